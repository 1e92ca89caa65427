"""`python -m mdsd` is the same program as `mdsd`."""

from mdsd.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
