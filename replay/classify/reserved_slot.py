"""F23 in the reserved page: a padding row left NaN in slot 0, and a read took it in.

Kernels clamp an index that names nothing to 0, load that row and mask it later; what is no number stays none. Asked
where no misreading gives the logits of a read: they are no numbers from some row to its end (the tile that is filled up
with masked rows), its own rows are numbers, and slot 0 of a page that nobody was given was seen to hold NaN after a
padding row had been stored there. That the kernel loaded that slot is not seen: it is never certain.
"""

from __future__ import annotations

import numpy as np

from replay.classify.base import Evidence
from replay.classify.hypotheses import Question
from replay.classify.padding_row_written import padding_rows
from replay.kernels.reference import decode_pages
from replay.timeline import Timeline

#: Looks that may show the reserved page.
_STAGES = ("ST", "SE", "RC", "LT", "RD")


def dirty(timeline: Timeline, evidence: Evidence, question: Question) -> tuple[str, ...]:
    """What points to a NaN in slot 0 as the cause of the wrong logits, in words; empty where something does not."""
    case = question.case
    first = int(np.argmax(question.wrong))
    ended = bool(question.wrong[first:].all()) and bool(np.isnan(case.logits[first:]).all())
    if case.kernel or not ended or not np.isfinite(question.right).all():
        return ()
    if timeline.owners.allocs_of_page(case.process, 0) or not evidence.covers(case.process, "alloc"):
        return ()  # page 0 is somebody's, or may be
    look = _last_look(timeline, case.buffer, case.seq)
    if look < 0:
        return ()
    read, seen = timeline.moment("read", case.read), timeline.snapshots.moment_of(look)
    for write in evidence.local.of_page(case.buffer, 0):
        if 0 not in padding_rows(timeline, write, 0):
            continue
        if timeline.order.before(write.moment, seen) and timeline.order.before(write.moment, read):
            step = int(timeline.trace.table("store")["step"][write.row])
            return (
                f"row 0 of page 0, which nobody was given, holds NaN; step {step} stored a padding row there before",
                f"the logits are no numbers from row {first} to the end, the rows that were read are: so does a kernel "
                "that loads slot 0 for rows that do not exist, and masks them later",
            )
    return ()


def _last_look(timeline: Timeline, buffer: int, seq: int) -> int:
    """The last look at page 0 up to ``seq`` of its process if it shows NaN in row 0, -1 otherwise."""
    snaps, contents = timeline.snapshots, timeline.trace.contents
    looks = np.concatenate([snaps.at_place(stage, buffer, 0) for stage in _STAGES])
    looks = looks[(snaps.seq[looks] <= seq) & (snaps.content[looks] >= 0)]
    if not len(looks):
        return -1
    last = int(looks[int(np.argmax(snaps.seq[looks]))])
    content = snaps.content[[last]]
    if not contents.has_data[int(content[0])]:
        return -1
    row = decode_pages(timeline.buffers[buffer].layout, np.asarray(contents.data(content)))[0, 0]
    return last if bool(np.isnan(row).any()) else -1
