"""The measurements behind the claims of speed and memory; `make bench` runs them."""

from pathlib import Path

RESULTS = Path(__file__).parent / "results"
