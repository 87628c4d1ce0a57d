"""`python -m iglens_tl`: the command line without its script."""

from iglens_tl.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
