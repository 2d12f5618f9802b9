"""Kinds whose evidence lies in what the descriptors brought and when: F06, F07, F12."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from capture_hooks.layouts import layout
from replay.classify.page_layouts import hypotheses
from replay.verdict import Finding, Verdict
from tests.scenarios import pattern
from tests.scenarios.outcome import expect, page_finding, verdict_of
from tests.scenarios.scene import Job, Scene
from tests.scenarios.stories import begun, ended, ours

KEEPS = pytest.mark.parametrize("keep", ["bytes", "digests"])
SCALES = pytest.mark.parametrize("scales", pattern.SCALES)
FORMATS = pytest.mark.parametrize("format", ["fp8", "bf16", "fp4"])

U8 = npt.NDArray[np.uint8]

#: (start, stop, where in the source page it is taken from)
Part = tuple[int, int, int]


def sent_in_parts(scene: Scene, parts: list[Part], job: Job | None = None) -> Job:
    """Every page is brought by one descriptor a part; the engine's item length is the page's."""
    job = begun(scene, job)
    scene.send(job, parts=parts)
    ended(scene, job)
    return job


@KEEPS
@pytest.mark.parametrize(
    ("format", "scales"), [("fp8", "standard"), ("fp8", "powers"), ("bf16", "standard"), ("fp4", "standard")]
)
def test_f06_the_second_half_of_every_page_is_left_out(
    tmp_path: Path, format: str, scales: pattern.Scales, keep: Any
) -> None:
    scene = Scene(tmp_path, format=format, scales=scales, keep=keep)
    spec = layout(format)
    half = spec.page_bytes // 2
    sent_in_parts(scene, [(0, half, 0)])
    verdict = verdict_of(scene)
    wanted = []
    for k in range(3):
        right = pattern.page(0, 0, k, scales=scales, format=format)
        seen = pattern.page(9, 0, k, scales=scales, format=format)
        seen[:half] = right[:half]
        wanted.append(page_finding(k, 5 + k, seen, right, keep=keep, spec=spec))
    (finding,) = expect(verdict, "F06", "partial-slice", "descriptor", room=7000, pages=wanted)
    assert f"[0,{half})" in " ".join(finding.evidence)


@KEEPS
def test_f06_a_slice_in_the_middle_needs_no_item_length_to_be_told_apart(tmp_path: Path, keep: Any) -> None:
    scene = Scene(tmp_path, keep=keep)
    sent_in_parts(scene, [(2048, 4096, 2048)])
    (finding,) = expect(verdict_of(scene), "F06", "partial-slice", "descriptor", room=7000)
    assert finding.pages[0].value_rows == ((0, 15), (32, 63))
    assert finding.runner_up is not None
    assert finding.runner_up.code == "F03"


@KEEPS
def test_f06_every_part_is_the_first_part_of_the_source(tmp_path: Path, keep: Any) -> None:
    """Four ranks, and an integer division gives each of them head 0."""
    scene = Scene(tmp_path, format="bf16", keep=keep)
    sent_in_parts(scene, [(part * 4096, (part + 1) * 4096, 0) for part in range(4)])
    (finding,) = expect(verdict_of(scene), "F06", "partial-slice", "descriptor", room=7000)
    assert finding.pages[0].value_rows == ((16, 63),)
    assert finding.rule == "every part is the source's bytes [0,4096)"


@KEEPS
def test_f06_parts_that_do_not_lie_side_by_side_are_no_slice_of_a_row(tmp_path: Path, keep: Any) -> None:
    """The first half of the page, in two pieces, is brought once more to the place of the second."""
    scene = Scene(tmp_path, format="bf16", keep=keep)
    sent_in_parts(scene, [(at, at + 4096, at % 8192) for at in range(0, 16384, 4096)])
    (finding,) = verdict_of(scene).findings
    assert (finding.code, finding.stage, finding.confidence) == ("unclassified", "descriptor", "likely")


def permuted_descriptors(name: str) -> list[Part]:
    """The pieces of a page that a permutation moves."""
    permutation = dict(hypotheses(layout("fp8")))[name]
    cuts = np.flatnonzero(np.diff(permutation) != 1) + 1
    edges = [0, *cuts.tolist(), len(permutation)]
    return [(a, b, int(permutation[a])) for a, b in pairwise(edges)]


@KEEPS
@SCALES
@pytest.mark.parametrize("name", ["written as interleaved rows", "read as interleaved rows"])
def test_f07_descriptors_that_bring_each_row_to_an_interleaved_place(
    tmp_path: Path, scales: pattern.Scales, keep: Any, name: str
) -> None:
    scene = Scene(tmp_path, scales=scales, keep=keep)
    sent_in_parts(scene, permuted_descriptors(name))
    (finding,) = expect(verdict_of(scene), "F07", "layout-permuted", "descriptor", room=7000)
    assert finding.rule == f"the page is {name}"
    assert [page.logical for page in finding.pages] == [0, 1, 2]


def repacked(scene: Scene, permutation: Any, *, when: str = "wire", rows: int = 192) -> Verdict:
    """The receiver turns whole pages into another layout, before or after it looks at them."""
    job = Job(7000, 0, rows, [21, 22, 23], [5, 6, 7])
    begun(scene, job)
    scene.send(job)

    def repack() -> None:
        for memory in scene.decode.memory.values():
            for page in job.decode:
                memory[page] = memory[page][permutation]

    if when == "wire":
        repack()
    scene.arrive(job)
    if when == "later":
        repack()
    scene.look("LT", job)
    scene.read(job)
    return verdict_of(scene)


@FORMATS
@pytest.mark.parametrize("when", ["wire", "later"])
def test_f07_pages_that_the_receiver_repacked(tmp_path: Path, format: str, when: str) -> None:
    spec = layout(format)
    chosen = [0, len(hypotheses(spec)) // 2, -1]
    for number, (name, permutation) in enumerate(hypotheses(spec)[index] for index in chosen):
        folder = tmp_path / str(number)
        folder.mkdir()
        verdict = repacked(Scene(folder, format=format), permutation, when=when)
        (finding,) = expect(verdict, "F07", "layout-permuted", "descriptor", room=7000)
        assert finding.rule == f"the page is {name}"


@pytest.mark.parametrize("rows", [1, 65, 100, 190])
def test_f07_the_rows_past_the_valid_ones_need_not_fit(tmp_path: Path, rows: int) -> None:
    """A page with few valid rows may give too little to name a layout by: then it stays unclassified."""
    permutation = dict(hypotheses(layout("fp8")))["written as 16 x 16 tiles"]
    verdict = repacked(Scene(tmp_path), permutation, rows=rows)
    assert verdict.verdict == "divergent"
    assert {f.code for f in verdict.findings} <= {"F07", "unclassified"}
    if rows > 64:
        assert verdict.findings[0].code == "F07"


def test_f07_by_digest_alone_is_left_unclassified(tmp_path: Path) -> None:
    permutation = dict(hypotheses(layout("fp8")))["written as 16 x 16 tiles"]
    verdict = repacked(Scene(tmp_path, keep="digests"), permutation)
    assert {f.code for f in verdict.findings} <= {"F31", "unclassified"}
    assert all(f.confidence != "certain" for f in verdict.findings)


INTERLEAVED = "written as interleaved rows"


@pytest.mark.parametrize("when", ["wire", "later"])
@pytest.mark.parametrize("format", ["fp8", "fp4"])
@SCALES
def test_f07_by_digest_where_the_layout_leaves_some_rows_whole(
    tmp_path: Path, scales: pattern.Scales, format: str, when: str
) -> None:
    scene = Scene(tmp_path, format=format, scales=scales, keep="digests", layers=(0, 1))
    verdict = repacked(scene, dict(hypotheses(layout(format)))[INTERLEAVED], when=when)
    how: dict[str, Any] = {"room": 7000, "layers": (0, 1), "confidence": "likely"}
    for finding in expect(verdict, "F07", "layout-permuted", "descriptor", **how):
        assert finding.rule == f"the page is {INTERLEAVED}"


def whole_row(pages: U8, right: U8) -> None:
    """A row that the layout leaves whole is another's."""
    pages[1, 17 * 64 : 18 * 64] = right[1, 20 * 64 : 21 * 64]


def cut_row(pages: U8, right: U8) -> None:
    """A row that the layout cuts up is in its place."""
    pages[1, 5 * 64 : 6 * 64] = right[1, 5 * 64 : 6 * 64]


def foreign_page(pages: U8, right: U8) -> None:
    """A page holds what nobody wrote."""
    pages[2] = np.random.default_rng(7).integers(1, 120, pages.shape[1])


@pytest.mark.parametrize("change", [whole_row, cut_row, foreign_page])
def test_f07_by_digest_needs_every_page_to_agree(tmp_path: Path, change: Callable[[U8, U8], None]) -> None:
    scene = Scene(tmp_path, format="fp4", keep="digests")
    job = begun(scene)
    scene.send(job)
    memory = scene.decode.memory[0]
    right = memory[job.decode].copy()
    pages = right[:, dict(hypotheses(layout("fp4")))[INTERLEAVED]]
    change(pages, right)
    memory[job.decode] = pages
    ended(scene, job)
    assert {finding.code for finding in verdict_of(scene).findings} == {"unclassified"}


def test_f07_one_order_for_all_pages_that_no_layout_has(tmp_path: Path) -> None:
    permutation = np.random.default_rng(5).permutation(8448)
    verdict = repacked(Scene(tmp_path), permutation)
    expect(verdict, "F07", "layout-permuted", "descriptor", room=7000, confidence="likely")


def test_another_order_in_each_page_is_no_layout(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    job = begun(scene)
    scene.send(job)
    random = np.random.default_rng(6)
    for page in job.decode:
        scene.decode.memory[0][page] = random.permutation(scene.decode.memory[0][page])
    ended(scene, job)
    for finding in verdict_of(scene).findings:
        assert finding.code in ("F31", "unclassified")


def altered(scene: Scene, change: Callable[[U8], None], *, used: bool = True) -> Finding:
    """Page 6 is altered between landing and completion, and stays so; ``used``: others had lived on the pages."""
    scene.healthy(Job(7005, 3, 128, [30, 31], [9, 10]))
    job = begun(scene, used=used)
    scene.send(job)
    change(scene.decode.memory[0])
    ended(scene, job)
    (finding,) = verdict_of(scene).findings
    assert [page.logical for page in finding.pages] == [1]
    return finding


def flipped(memory: U8) -> None:
    memory[6, 300:340] ^= 0x55


def shuffled(memory: U8) -> None:
    memory[6, 256:1280] = np.random.default_rng(4).permutation(memory[6, 256:1280])


def foreign_rows(memory: U8) -> None:
    memory[6, 256:1280] = memory[9, 512:1536]


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (flipped, ("F31", "likely")),
        (shuffled, ("unclassified", "likely")),
        (foreign_rows, ("unclassified", "likely")),
    ],
)
def test_altered_bytes_are_lost_on_the_wire_where_they_are_nobodys(
    tmp_path: Path, change: Callable[[U8], None], wanted: tuple[str, str]
) -> None:
    found = altered(Scene(tmp_path), change)
    assert (found.code, found.confidence) == wanted
    assert found.stage == "wire"


def test_the_old_bytes_of_a_loss_have_to_be_known_for_certainty(tmp_path: Path) -> None:
    def lost(memory: U8) -> None:
        memory[6, 256:1280] = 0

    for drop, confidence in (((), "certain"), (("RC.before",), "likely")):
        folder = tmp_path / confidence
        folder.mkdir()
        found = altered(Scene(folder, drop=drop), lost, used=False)
        assert (found.code, found.confidence) == ("F31", confidence)


def late_layers(
    scene: Scene,
    late: tuple[int, ...],
    *,
    apart: bool = True,
    torn: bool = False,
    rows: int = 192,
    lands: bool = True,
) -> Verdict:
    """Completion is told while the transfer of the ``late`` layers has not landed.

    ``apart``: they have a transfer of their own. ``torn``: a part of them had landed. With fewer ``rows`` than the
    pages hold, decode has appended one by then. Without ``lands`` the request is over before they do.
    """
    job = replace(ours(), rows=rows)
    begun(scene, job)
    first = [(layer, layer) for layer in scene.prefill.layers if layer not in late]
    second = [(layer, layer) for layer in late]
    if apart:
        if first:
            scene.send(job, pairs=first)
        transfer = scene.post(job, pairs=second)
        if torn:
            scene.land(transfer, only=(0, 4096), pages=job.decode)
    else:
        transfer = scene.post(job, pairs=first + second)
        for layer, start, target, to, length in transfer.pieces:
            if target not in late:
                source = scene.prefill.memory[layer].reshape(-1)[start : start + length]
                scene.decode.memory[target].reshape(-1)[to : to + length] = source
    scene.arrive(job)
    scene.read(job)
    if rows < 192:
        scene.append(job)
        scene.read(job)
    if not lands:
        scene.look("LT", job)
        scene.free(scene.decode, job)
    scene.land(transfer)
    scene.done(transfer)
    if lands:
        scene.look("LT", job)
        scene.read(job)
    return verdict_of(scene)


@KEEPS
@SCALES
@pytest.mark.parametrize("late", [(2,), (1, 2)])
def test_f12_a_whole_buffer_that_arrives_after_the_first_read(
    tmp_path: Path, scales: pattern.Scales, keep: Any, late: tuple[int, ...]
) -> None:
    scene = Scene(tmp_path, layers=range(3), scales=scales, keep=keep)
    verdict = late_layers(scene, late)
    found = expect(verdict, "F12", "component-late", "completion", room=7000, layers=late)
    for finding in found:
        wanted = [
            page_finding(
                k,
                5 + k,
                pattern.page(9, finding.layer, k, scales=scales),
                pattern.page(0, finding.layer, k, scales=scales),
                keep=keep,
            )
            for k in range(3)
        ]
        assert [(p.logical, p.value_rows, p.bytes_differing) for p in finding.pages] == [
            (p.logical, p.value_rows, p.bytes_differing) for p in wanted
        ]


@KEEPS
@pytest.mark.parametrize(("apart", "code"), [(True, "F12"), (False, "F09")])
def test_f12_what_comes_late_overwrites_the_rows_that_were_appended_by_then(
    tmp_path: Path, keep: Any, apart: bool, code: str
) -> None:
    verdict = late_layers(Scene(tmp_path, layers=range(3), keep=keep), (2,), rows=170, apart=apart)
    assert {(f.code, f.stage, f.layer, f.confidence) for f in verdict.findings} == {
        (code, "completion", 2, "certain")
    }
    rows = {row for f in verdict.findings for p in f.pages if p.logical == 2 for row in p.value_rows}
    assert rows == {(0, 42)}, "the prompt's 42, and the one that decode had appended"


@KEEPS
@pytest.mark.parametrize(("apart", "code"), [(True, "F12"), (False, "F09")])
def test_f12_a_buffer_that_comes_after_the_request_is_over(
    tmp_path: Path, keep: Any, apart: bool, code: str
) -> None:
    verdict = late_layers(Scene(tmp_path, layers=range(3), keep=keep), (2,), lands=False, apart=apart)
    assert {(f.code, f.layer, f.confidence) for f in verdict.findings} == {(code, 2, "certain")}


@KEEPS
@pytest.mark.parametrize("seen", [True, False], ids=["read old", "read foreign"])
def test_f12_of_a_buffer_that_a_late_one_of_another_request_overwrote(
    tmp_path: Path, keep: Any, seen: bool
) -> None:
    """Both components come after their completion was told; the first request is over by then, and its pages given
    to the second.
    """
    scene = Scene(tmp_path, layers=range(3), keep=keep)
    first, second = Job(7001, 1, 192, [24, 25, 26], [5, 6, 7]), ours()
    together, apart = [(0, 0), (1, 1)], [(2, 2)]
    late = {}
    for job in (first, second):
        begun(scene, job, used=job is first)
        scene.send(job, pairs=together)
        scene.tell(job)
        late[job.room] = scene.post(job, pairs=apart)
        scene.arrive(job, told=True)
        if job is first:
            scene.read(job)
            scene.free(scene.decode, job)
    if seen:
        scene.read(second)
    for room in (7000, 7001):
        scene.land(late[room])
        scene.done(late[room])
        scene.look("LT", second)
    scene.read(second)
    found = {(f.code, f.layer, f.confidence): f for f in verdict_of(scene).findings if f.request.room == 7000}
    assert set(found) == {("F12", 2, "certain" if seen else "likely"), ("F14", 2, "certain")}
    told = [line for f in found.values() for line in f.evidence]
    assert ("a read (RD) saw the old bytes" in told) == seen
    assert not any("were complete at reception" in line for line in told)


@pytest.mark.parametrize(
    ("ends", "confidence"),
    [("before completion is told", "likely"), ("after it", "certain"), ("between two", "likely")],
)
def test_f12_is_certain_only_where_the_late_buffer_cannot_have_been_waited_for(
    tmp_path: Path, ends: str, confidence: str
) -> None:
    """Two prefill ranks may tell completion. In each case the sender learns of the end before decode looks."""
    scene = Scene(tmp_path, layers=range(2))
    job = begun(scene)
    scene.send(job, pairs=[(0, 0)])
    late = scene.post(job, pairs=[(1, 1)])
    if ends == "before completion is told":
        scene.done(late)
    scene.tell(job, "0a1b2c3d4e.0")
    if ends != "before completion is told":
        scene.done(late)
    if ends == "between two":
        scene.tell(job, "0a1b2c3d4e.1")
    scene.edge(scene.prefill, scene.decode, "status", "7001.0")
    scene.arrive(job, told=True)
    scene.read(job)
    scene.land(late)
    scene.look("LT", job)
    (finding,) = verdict_of(scene).findings
    assert (finding.code, finding.layer, finding.confidence) == ("F12", 1, confidence)


@KEEPS
def test_f12_a_torn_buffer_is_no_late_component(tmp_path: Path, keep: Any) -> None:
    verdict = late_layers(Scene(tmp_path, layers=range(3), keep=keep), (2,), torn=True)
    expect(verdict, "F09", "completion-early", "completion", room=7000, layers=(2,))


@KEEPS
def test_f12_a_layer_of_the_same_transfer_is_no_late_component(tmp_path: Path, keep: Any) -> None:
    verdict = late_layers(Scene(tmp_path, layers=range(3), keep=keep), (2,), apart=False)
    expect(verdict, "F09", "completion-early", "completion", room=7000, layers=(2,))


@KEEPS
def test_f12_without_a_buffer_that_is_whole_it_is_the_completion_that_was_early(
    tmp_path: Path, keep: Any
) -> None:
    verdict = late_layers(Scene(tmp_path, layers=(2,), keep=keep), (2,), apart=True)
    expect(verdict, "F09", "completion-early", "completion", room=7000, layers=(2,))
