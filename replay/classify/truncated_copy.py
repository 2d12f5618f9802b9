"""F08: a copy to another tier and back carried less than a page or a row has.

Signature: the same last bytes of every page (or of every row) are not those of the page's origin: they hold what was
there before. The copies that brought the page were told to carry fewer bytes, or to host pages that are smaller.

Chosen over F03 and F06, where the transfer between the sides leaves the tail out: its descriptors say so, and here they
do not; over F15, where no copy filled the page; over F09 and F31, since the page was wrong before anything was sent.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from replay.bisect import Case
from replay.classify.base import Evidence, Explanation, Kind, claims, halves, in_words, runs, unit_mask
from replay.verdict import RunnerUp

Bool = npt.NDArray[np.bool_]

KIND = Kind(
    code="F08",
    shows="a page that was copied off and back lacks the bytes that the copies were not told to carry",
    certain="the copies and the origin's content are recorded, every altered row lies in the part left out",
    best=claims(digest="certain", pages="certain"),
    rivals=(
        ("F03", "the copy beside the transfer is too short, not the transfer"),
        ("F06", "the transfer's descriptors bring the whole page"),
        ("F15", "a copy that filled the page left these bytes out"),
    ),
)


def explain(case: Case, evidence: Evidence, bad: Bool, stage: str) -> Explanation | None:
    """Units of ``bad`` that the copies which brought the page did not carry whole."""
    if not case.has("CP"):
        return None
    origin = evidence.local.origins.origin(case.rows["CP"])
    if origin is None or origin.covered.all() or len(origin.covered) != case.layout.page_bytes:
        return None
    left_out = bad & ~unit_mask(case.layout, origin.covered)
    # The look after the copy shows the damage already.
    explained = left_out & case.same("CP", stage)
    if not explained.any():
        return None
    timeline, snaps = case.timeline, case.timeline.snapshots
    table = timeline.trace.table("copy")
    lengths = ", ".join(
        f"{table['operation'][row]} of {int(table['length'][row])} bytes a {table['unit'][row]}"
        for row in reversed(origin.copies)
    )
    values, scales = halves(explained)
    process = int(snaps.process[case.rows["CP"]])
    missing = runs(~origin.covered)
    words = (
        f"bytes [{missing[0][0]},{missing[0][1]}) of every page"
        if len(missing) == 1
        else f"the last {missing[0][1] - missing[0][0]} bytes of every row"
    )
    request, of = int(snaps.request[origin.look]), ""
    if request not in (-1, case.request):
        of = f"its content is that of room {timeline.requests[request][0]}'s logical page"
    sure = bool((explained == bad).all())
    return Explanation(
        code="F08",
        stage="descriptor",
        confidence="certain" if sure else "likely",
        explained=explained,
        expected=next((name for name in ("ST", "RC") if case.has(name)), "ST"),
        observed=stage,
        evidence=(
            f"the page was copied: {lengths}; a page has {case.layout.page_bytes}",
            f"{words} were not carried: {in_words(values, scales)} differ there",
            "the look after the copy shows the same",
            *((f"{of} {int(snaps.logical[origin.look])}",) if of else ()),
        ),
        rule=f"{words} are left out",
        runner_up=RunnerUp("F03", "the copy beside the transfer is too short, not the transfer"),
        at_source=process != case.process,
    )
