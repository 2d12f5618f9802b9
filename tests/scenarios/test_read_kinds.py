"""Faults at the read: bytes, table and lengths are right, and the reader takes them wrongly.

Each reader's twin, which takes them rightly, is clean; what a reader sees is computed by ``readers.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from replay.kernels.formats import decode_e4m3
from replay.verdict import Finding, Verdict
from tests.scenarios import pattern, readers
from tests.scenarios.outcome import expect, expect_clean, verdict_of
from tests.scenarios.scene import Job, Scene
from tests.scenarios.side import Side

SCALES = pytest.mark.parametrize("scales", pattern.SCALES)
PAGES = [5, 6, 7]
#: 37 rows of the last page are valid.
ROWS = 165


def read_wrongly(scene: Scene, reader: readers.Reader | None, *, job: Job | None = None) -> Verdict:
    """One request whose single read goes through ``reader``; other requests fill the pages 8 to 23."""
    neighbours = list(range(8, 24))
    scene.healthy(Job(7001, 1, 64 * len(neighbours), list(range(24, 40)), neighbours), reads=0)
    job = job or Job(7000, 0, ROWS, [21, 22, 23], PAGES)
    scene.healthy(job, reads=0)
    for layer in scene.decode.layers:
        change = None
        if reader is not None:
            change = readers.told(scene.decode, layer, job.decode, job.rows, reader)
        scene.read(job, logits=True, layers=[layer], change=change)
    return verdict_of(scene)


def named(verdict: Verdict, code: str, kind: str, *, confidence: str = "certain") -> Finding:
    """The one finding, which is at the read kernel and clears everything before it."""
    (finding,) = expect(verdict, code, kind, "read-kernel", room=7000, role="decode", confidence=confidence)
    for stage in ("source", "descriptor", "wire", "completion", "destination", "table"):
        assert stage in verdict.cleared
    assert "read-kernel" not in verdict.cleared
    if code != "unclassified":
        assert finding.runner_up is not None
        assert finding.runner_up.code != code
    return finding


@SCALES
def test_a_reader_without_fault_is_cleared(tmp_path: Path, scales: pattern.Scales) -> None:
    right = readers.of_pages(lambda pages: pages)
    verdict = read_wrongly(Scene(tmp_path, scales=scales), right)
    expect_clean(verdict)
    assert "read-kernel" in verdict.cleared


def test_s6_is_what_the_scenario_says_in_bytes() -> None:
    page = pattern.page(0, 0, 0)
    side = Side.__new__(Side)
    side.memory = {0: page[None]}
    seen, right = readers.interleaved(side, 0, [0], 64), readers.planar(page[None], 64)
    scale = float(page[128:132].view("<f4")[0])
    assert f"{scale:.3e}" == "3.547e-06"
    assert right[0, 0] / decode_e4m3(page[:1])[0] == 1.0
    assert np.array_equal(seen[0] / scale, right[0])  # the values of row 0 are right
    for row in range(1, 32):
        mine = page[row * 132 : row * 132 + 128]
        true = page[row * 128 : row * 128 + 128]
        assert np.array_equal(mine[: 128 - 4 * row], true[4 * row :])
    assert 62 * 132 + 128 > 8192  # rows 62 and 63 take values from the scale area
    assert 61 * 132 + 128 <= 8192


@SCALES
def test_s6_rows_read_as_interleaved_are_a_permuted_layout(tmp_path: Path, scales: pattern.Scales) -> None:
    finding = named(
        read_wrongly(Scene(tmp_path, scales=scales), readers.interleaved), "F07", "layout-permuted"
    )
    assert "interleaved" in str(finding.rule)
    assert [page.logical for page in finding.pages] == [0, 1, 2]
    assert finding.pages[2].value_rows == ((0, 36),)


def tiles(pages: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Values taken from 16 x 16 tiles, scales from their places."""
    flat = pages[:, :8192].reshape(-1, 4, 8, 16, 16)  # row tile, column tile, row, column
    return np.concatenate([flat.transpose(0, 1, 3, 2, 4).reshape(len(pages), -1), pages[:, 8192:]], axis=1)


def heads(pages: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Values taken from [4 heads, rows, 32] where the page is [rows, 4 heads, 32]."""
    flat = pages[:, :8192].reshape(-1, 4, 64, 32)
    return np.concatenate([flat.transpose(0, 2, 1, 3).reshape(len(pages), -1), pages[:, 8192:]], axis=1)


@SCALES
@pytest.mark.parametrize(("change", "words"), [(tiles, "16 x 16 tiles"), (heads, "HND with 4 heads")])
def test_tiles_and_heads_are_permuted_layouts_too(
    tmp_path: Path, scales: pattern.Scales, change: Callable[..., npt.NDArray[np.uint8]], words: str
) -> None:
    verdict = read_wrongly(Scene(tmp_path, scales=scales), readers.of_pages(change))
    assert words in str(named(verdict, "F07", "layout-permuted").rule)


@SCALES
@pytest.mark.parametrize(
    ("slab", "last", "first"), [(1_002_240, 2142, 2143), (1_077_120, 1993, 1994), (1_039_680, 2065, 2066)]
)
@pytest.mark.parametrize("foreign", [False, True])
def test_s7_pages_beyond_two_gib_are_an_integer_wrap(
    tmp_path: Path, scales: pattern.Scales, slab: int, last: int, first: int, foreign: bool
) -> None:
    """The 64 rows of both pages beyond the boundary are exactly 0.0; ``foreign``: something nobody has seen."""
    assert last * slab <= 2**31 - 1 < first * slab
    scene = Scene(tmp_path, scales=scales, slab=slab, pages=3001)
    job = Job(7000, 0, 256, [21, 22, 23, 24], [7, last, first, 3000])
    scene.healthy(job, reads=0)

    def wrapped(side: Side, layer: int, table: object, rows: int) -> npt.NDArray[np.float64]:
        keys = readers.planar(side.memory[layer][job.decode], rows)
        keys[128:] = np.roll(keys[128:], 77) if foreign else 0.0
        return keys

    scene.read(job, logits=True, change=readers.told(scene.decode, 0, job.decode, 256, wrapped))
    finding = named(verdict_of(scene), "F21", "integer-wrap", confidence="likely" if foreign else "certain")
    assert [(page.logical, page.physical) for page in finding.pages] == [(2, first), (3, 3000)]
    assert all(page.value_rows == ((0, 63),) for page in finding.pages)
    assert f"between pages {last} and {first}" in str(finding.rule)
    assert f"{slab:,}" in str(finding.rule)


def test_zeros_in_every_page_beyond_two_gib_may_be_a_kernel_that_computed_nothing(tmp_path: Path) -> None:
    scene = Scene(tmp_path, slab=1_002_240, pages=3001)
    job = Job(7000, 0, 128, [21, 22], [2143, 3000])
    scene.healthy(job, reads=0)

    def nothing(side: Side, layer: int, table: object, rows: int) -> npt.NDArray[np.float64]:
        return np.zeros((rows, 128))

    scene.read(job, logits=True, change=readers.told(scene.decode, 0, job.decode, 128, nothing))
    named(verdict_of(scene), "F21", "integer-wrap", confidence="likely")


def test_s7_without_the_fault_is_clean(tmp_path: Path) -> None:
    scene = Scene(tmp_path, slab=1_002_240, pages=3001)
    job = Job(7000, 0, 256, [21, 22, 23, 24], [7, 2142, 2143, 3000])
    scene.healthy(job, reads=0)
    scene.read(job, logits=True)
    expect_clean(verdict_of(scene))


@SCALES
@pytest.mark.parametrize("factor", [2, 3])
def test_pages_read_at_a_multiple_of_their_id_are_a_wrong_stride(
    tmp_path: Path, scales: pattern.Scales, factor: int
) -> None:
    verdict = read_wrongly(Scene(tmp_path, scales=scales), readers.at_pages(lambda page: factor * page))
    finding = named(verdict, "F20", "wrong-stride")
    assert f"= page {factor} * p" in str(finding.rule)


@SCALES
def test_pages_read_at_the_stride_of_another_format_are_a_wrong_stride(
    tmp_path: Path, scales: pattern.Scales
) -> None:
    """The view has 4,352 bytes a page where the buffer has 8,448: what lies there begins inside another page."""

    def shifted(side: Side, layer: int, table: list[int], rows: int) -> npt.NDArray[np.float64]:
        flat = side.memory[layer].reshape(-1)
        pages = np.stack([flat[page * 4352 :][:8448] for page in table])
        with np.errstate(invalid="ignore", over="ignore"):
            return readers.planar(pages, rows)

    scene = Scene(tmp_path, scales=scales)
    job = Job(7000, 0, 192, [21, 22, 23], [16, 18, 20])
    scene.healthy(Job(7001, 1, 64 * 8, list(range(24, 32)), list(range(4, 12))), reads=0)
    scene.healthy(job, reads=0)
    scene.read(job, logits=True, change=readers.told(scene.decode, 0, job.decode, 192, shifted))
    assert "4,352" in str(named(verdict_of(scene), "F20", "wrong-stride").rule)


@SCALES
@pytest.mark.parametrize(
    ("place", "words", "confidence"),
    [
        (lambda page, row: (page, 0), "one row is read for the whole page", "certain"),
        # Most of the pages 0 to 39 were never looked at.
        (lambda page, row: (row % 48, 0), "the index of a row is used as a page id", "likely"),
    ],
    ids=["repeated", "gathered"],
)
def test_rows_taken_for_pages_are_a_token_index(
    tmp_path: Path,
    scales: pattern.Scales,
    place: Callable[[int, int], tuple[int, int]],
    words: str,
    confidence: str,
) -> None:
    job = Job(7000, 0, 40, [21], [5])
    if words.startswith("one"):
        job = Job(7000, 0, ROWS, [21, 22, 23], PAGES)
    verdict = read_wrongly(Scene(tmp_path, scales=scales), readers.by_row(place), job=job)
    finding = named(verdict, "F22", "token-index-as-page-index", confidence=confidence)
    assert words in str(finding.rule)


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (lambda scale: 2.0 * scale, "all keys 2 times as large"),
        (lambda scale: 0.5 * scale, "e4m3fnuz"),
        (lambda scale: 2.0 ** np.floor(np.log2(scale)), "exponent alone"),
        (lambda scale: 2.0 ** np.ceil(np.log2(scale)), "rounded up"),
    ],
    ids=["double", "half", "floor", "ceil"],
)
def test_factors_and_powers_of_two_are_a_number_format(
    tmp_path: Path, factor: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]], words: str
) -> None:
    verdict = read_wrongly(Scene(tmp_path), readers.scaled(factor))
    assert words in str(named(verdict, "F24", "number-format").rule)


def test_scales_that_are_powers_of_two_can_be_read_as_such(tmp_path: Path) -> None:
    floor = readers.scaled(lambda scale: 2.0 ** np.floor(np.log2(scale)))
    expect_clean(read_wrongly(Scene(tmp_path, scales="powers"), floor))


@SCALES
def test_negative_zeros_that_become_no_numbers_are_the_other_e4m3(
    tmp_path: Path, scales: pattern.Scales
) -> None:
    """A byte 0x80 in rows 3 and 70: half the right logit elsewhere, NaN there."""
    scene = Scene(tmp_path, scales=scales)
    job = Job(7000, 0, ROWS, [21, 22, 23], PAGES)
    scene.start(job)
    scene.announce(job)
    slots = scene.write(scene.prefill, job, 0, ROWS)
    for row in (3, 70):
        scene.prefill.memory[0][job.prefill[row // 64], row % 64 * 128 + 9] = 0x80
    step = scene.step()
    scene.tell_store(scene.prefill, job, 0, slots, step)
    scene.seen_stored(scene.prefill, job, 0, ROWS, step)
    scene.send(job)
    scene.arrive(job)
    scene.look("LT", job)

    def fnuz(side: Side, layer: int, table: list[int], rows: int) -> npt.NDArray[np.float64]:
        return readers.planar(side.memory[layer][table], rows, bias=8)

    scene.read(job, logits=True, change=readers.told(scene.decode, 0, PAGES, ROWS, fnuz))
    finding = named(verdict_of(scene), "F24", "number-format")
    assert "e4m3fnuz" in str(finding.rule)


def test_bf16_read_as_fp16_is_a_number_format(tmp_path: Path) -> None:
    def halves(side: Side, layer: int, table: list[int], rows: int) -> npt.NDArray[np.float64]:
        words = np.ascontiguousarray(side.memory[layer][table]).view("<f2").reshape(-1, 128)
        return np.asarray(words[:rows], np.float64)

    verdict = read_wrongly(Scene(tmp_path, format="bf16"), halves)
    assert "fp16" in str(named(verdict, "F24", "number-format").rule)


@SCALES
def test_a_scale_that_serves_a_whole_tile_is_kernel_numerics(tmp_path: Path, scales: pattern.Scales) -> None:
    tile = readers.scaled(lambda scale: np.repeat(scale[::16], 16)[: len(scale)])
    finding = named(read_wrongly(Scene(tmp_path, scales=scales), tile), "F25", "kernel-numerics")
    assert any(line.startswith("tried on the same bytes") for line in finding.evidence)


def test_logits_of_keys_that_nobody_has_seen_are_not_called_arithmetic(tmp_path: Path) -> None:
    draw = np.random.default_rng(3)
    strange = readers.of_pages(lambda pages: draw.integers(1, 120, pages.shape, dtype=np.uint8) | (pages & 0))

    def values_only(side: Side, layer: int, table: list[int], rows: int) -> npt.NDArray[np.float64]:
        with np.errstate(over="ignore"):
            return np.asarray(np.clip(strange(side, layer, table, rows), -448, 448))

    named(read_wrongly(Scene(tmp_path), values_only), "unclassified", "unclassified", confidence="likely")


def test_without_bytes_no_reader_is_accused(tmp_path: Path) -> None:
    verdict = read_wrongly(Scene(tmp_path, keep="digests"), readers.interleaved)
    assert verdict.findings == ()
    assert "read-kernel" not in verdict.cleared


def test_a_read_of_few_rows_is_not_enough_to_name_a_kind(tmp_path: Path) -> None:
    job = Job(7000, 0, 3, [21], [5])
    verdict = read_wrongly(Scene(tmp_path), readers.interleaved, job=job)
    (finding,) = verdict.findings
    assert finding.confidence == "likely"
    assert finding.code in ("unclassified", "F25")
