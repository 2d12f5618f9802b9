"""The pages on kinds of fault (docs/kinds), and finding a kind by what somebody calls it."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from replay.classify.base import VOCABULARY

#: The pages in an installed package, and in a checkout.
_FOLDERS = (Path(__file__).parent / "kinds_pages", Path(__file__).parent.parent / "docs" / "kinds")


#: Each kind in one line, for lists.
LINES = {
    "F01": "one buffer is not in the transfer at all",
    "F02": "the page list ends before the request does",
    "F03": "the sides disagree on a page's length or pitch",
    "F04": "page ids of one space used in another",
    "F05": "layers paired by position, not by id",
    "F06": "only a share of every page is sent",
    "F07": "the same bytes in another order",
    "F08": "a local copy cuts the end of rows or pages",
    "F09": "success was told while bytes were on their way",
    "F10": "sent before the store had filled the page",
    "F11": "the source page was given on before the send",
    "F12": "one component was read before it arrived",
    "F13": "a failed transfer's pages were used",
    "F14": "an aborted request's write lands on the next",
    "F15": "the reader's own process cleared the page",
    "F16": "a reference outlived the page's owner",
    "F17": "an old slot translation was used",
    "F18": "the kernel's block table was stale or torn",
    "F19": "the read is one row or page too long or short",
    "F20": "page p looked for at p times a wrong stride",
    "F21": "offsets beyond 32 bits wrap around",
    "F22": "a token's number used as a page's",
    "F23": "a padding row was stored over a real one",
    "F24": "right bytes decoded as another number format",
    "F25": "logits off that no misreading explains",
    "F26": "top-k slots that name no row",
    "F27": "top-k rows that are not among the best",
    "F28": "another request's metadata was taken",
    "F29": "a draft step wrote or read rows not its own",
    "F30": "the store wrote other bytes than it should",
    "F31": "bytes lost or altered on the way, for good",
}


class UnknownKindError(ValueError):
    """No kind has that name; ``near`` is the nearest that one has, or None."""

    def __init__(self, name: str, near: str | None) -> None:
        super().__init__(name)
        self.name, self.near = name, near


def find_kind(name: str) -> str:
    """The code of ``name``: a code or a kind in any case, with spaces or underscores for dashes.

    Raises:
        UnknownKindError: there is none.
    """
    wanted = re.sub(r"[\s_-]+", "-", name.strip().lower())
    names = {code.lower(): code for code in VOCABULARY} | {
        kind: code for code, (kind, _) in VOCABULARY.items()
    }
    if wanted in names:
        return names[wanted]
    number = re.fullmatch(r"f?-?0*(\d{1,2})", wanted)
    if number and f"f{int(number[1]):02d}" in names:
        return names[f"f{int(number[1]):02d}"]
    near = difflib.get_close_matches(wanted, names, n=1, cutoff=0.5)
    part = [kind for kind in names if len(wanted) > 3 and wanted in kind]
    raise UnknownKindError(name, near[0] if near else part[0] if part else None)


def page_name(code: str) -> str:
    """File name of the page on ``code``."""
    return f"{code}-{VOCABULARY[code][0]}.md"


def page(code: str) -> str:
    """The page on ``code``, Markdown.

    Raises:
        FileNotFoundError: the pages are not installed.
    """
    for folder in _FOLDERS:
        path = folder / page_name(code)
        if path.exists():
            return path.read_text(encoding="utf-8")
    raise FileNotFoundError(
        f"the page {page_name(code)} is missing from this installation: install kv-replay again"
    )
