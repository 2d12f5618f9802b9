"""One byte that changes is accused exactly where it matters, and nowhere else."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from capture_hooks.layouts import layout
from replay.verdict import Verdict
from tests.property.test_verdict_healthy import folder, quick
from tests.scenarios.outcome import expect_clean, verdict_of
from tests.scenarios.scene import Scene
from tests.scenarios.side import Job

LAYERS = (1, 4)

changes = st.fixed_dictionaries(
    {
        "rows": st.integers(1, 250),
        "layer": st.sampled_from(LAYERS),
        "where": st.integers(0, 10**6),
        "byte": st.integers(0, 10**6),
        "flip": st.integers(1, 255),
        "format": st.sampled_from(["fp8", "bf16", "fp4"]),
        "keep": st.sampled_from(["bytes", "digests"]),
        "moment": st.sampled_from(["wire", "destination"]),
    }
)


def story(folder_: Any, change: dict[str, Any], row: int) -> tuple[Verdict, int, int, bool]:
    """Change one byte of ``row`` (within the pages of the request) at the destination.

    Returns the verdict, the logical page, the row in it and whether the byte was a scale byte.
    """
    spec = layout(change["format"])
    scene = Scene(folder_, layers=LAYERS, format=change["format"], keep=change["keep"], pages=12)
    scene.earlier([1, 2, 3, 4], [5, 6, 7, 8])
    job = Job(7000, 0, change["rows"], [4, 3, 2, 1], [8, 5, 7, 6])
    width = spec.value_bytes + spec.scale_bytes
    offset = change["byte"] % width
    logical, inside = divmod(row, spec.rows)
    place = (
        inside * spec.value_bytes + offset
        if offset < spec.value_bytes
        else spec.scale_base + inside * spec.scale_bytes + offset - spec.value_bytes
    )

    def flip() -> None:
        scene.decode.memory[change["layer"]][job.decode[logical], place] ^= np.uint8(change["flip"])

    scene.start(job)
    scene.announce(job)
    scene.store(job, 0, job.rows)
    transfer = scene.post(job)
    scene.land(transfer)
    if change["moment"] == "wire":
        flip()
    scene.done(transfer)
    scene.arrive(job)
    if change["moment"] == "destination":
        flip()
    scene.look("LT", job)
    scene.read(job)
    return verdict_of(scene), logical, inside, offset >= spec.value_bytes


@quick
@given(change=changes)
def test_a_changed_byte_of_a_valid_row_is_found_with_exactly_its_page_and_row(
    change: dict[str, Any],
) -> None:
    with folder() as path:
        verdict, logical, inside, scale = story(path, change, change["where"] % change["rows"])
        assert verdict.verdict == "divergent"
        (finding,) = verdict.findings
        assert finding.stage == change["moment"]
        kinds = {"wire": {"F31", "unclassified"}, "destination": {"F15", "unclassified"}}
        assert finding.code in kinds[change["moment"]]
        assert (finding.request.room, finding.layer) == (7000, change["layer"])
        (page,) = finding.pages
        assert (page.logical, page.physical) == (logical, [8, 5, 7, 6][logical])
        row = ((inside, inside),)
        assert page.value_rows == (() if scale else row)
        assert page.scale_rows == (row if scale else ())
        assert page.bytes_differing == (1 if change["keep"] == "bytes" else None)
        assert page.donor is None


@quick
@given(change=changes)
def test_a_changed_byte_past_the_valid_rows_is_nobodys_claim(change: dict[str, Any]) -> None:
    change = change | {"rows": min(change["rows"] - change["rows"] % 64 + 1 + change["where"] % 63, 250)}
    last = -(-change["rows"] // 64) * 64
    row = change["rows"] + change["where"] % (last - change["rows"])
    with folder() as path:
        verdict, *_ = story(path, change, row)
        expect_clean(verdict)
