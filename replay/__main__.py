"""``python -m replay``: the command where its script is not on the path."""

from replay.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
