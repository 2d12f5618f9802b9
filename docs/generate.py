"""Writes the parts of the documents that come from code: ``make docs``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from replay.classify import registry
from replay.commands.env import markdown_table

DOCS = Path(__file__).parent
BEGIN, END = "<!-- made by `make docs` from the classifiers' declarations -->", "<!-- end -->"


def pages() -> dict[Path, str]:
    """Page -> its text as it should be."""
    verdicts = (DOCS / "verdicts.md").read_text()
    table = f"{BEGIN}\n\n{registry.markdown()}\n{END}"
    pattern = re.escape(BEGIN) + ".*?" + re.escape(END)
    return {
        DOCS / "verdicts.md": re.sub(pattern, lambda _: table, verdicts, count=1, flags=re.DOTALL),
        DOCS / "options.md": markdown_table(),
    }


def main() -> int:
    """Write every page that differs."""
    for path, text in pages().items():
        if path.read_text() != text:
            path.write_text(text)
            sys.stdout.write(f"wrote {path.name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
