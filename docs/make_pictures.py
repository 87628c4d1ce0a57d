"""Make the README's pictures from the embedded model: `make pictures`. Needs kaleido and Chrome or Chromium."""

from pathlib import Path

from iglens_tl import generate_and_attribute, ig_lens, plots
from iglens_tl.demo import demo_model

IMAGES = Path(__file__).parent / "images"


def main() -> None:
    """Write `images/waterfall.png` and `images/heatmap.png`, 800 pixels wide at 1.5 times the resolution."""
    IMAGES.mkdir(exist_ok=True)
    model = demo_model()
    france = ig_lens(model, "The capital of France is", targets=" Paris")
    plots.write_image(plots.waterfall(france), IMAGES / "waterfall.png", scale=1.5)
    vietnam = generate_and_attribute(model, "What is the capital of Vietnam?", chat=True)
    plots.write_image(plots.heatmap(vietnam), IMAGES / "heatmap.png", scale=1.5)


if __name__ == "__main__":
    main()
