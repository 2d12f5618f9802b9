"""The first rung: stores whose inputs were kept are executed again and compared with what is in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from capture_hooks.layouts import LAYOUTS, layout
from replay.kernels.store_reference import rope_rows
from replay.kernels.twins import store_torch
from replay.reexecute import GONE
from tests.scenarios.outcome import expect, expect_clean, verdict_of
from tests.scenarios.scene import Job, Scene
from tests.scenarios.test_kinds_of_local_writes import padded

F32 = npt.NDArray[np.float32]

ROWS = 150
FORMATS = pytest.mark.parametrize("format", sorted(LAYOUTS))
EPSILON = 1e-6


def stored(
    folder: Path,
    format: str,
    *,
    wrong: dict[int, int] | None = None,
    shift: int = 0,
    factor: int = 1,
    inputs: bool = True,
    keep: Any = "bytes",
    earlier: bool = True,
    common: float = 0.0,
    taken: Callable[[F32], F32] | None = None,
    after: Callable[[Scene], None] | None = None,
    seen: int = ROWS,
    draft: bool = False,
    pad: int | None = None,
) -> Scene:
    """q0's rows come out of the real store; ``wrong`` flips bits of the first value byte of rows (row: bits).

    ``shift`` rotates each row by the position of another token; what is recorded is the right one. The rows of page p
    lie at page ``factor * p``. Without ``earlier`` nobody has seen the pages before; ``common`` is how much larger than
    its own share of a key is what all keys have in common; ``taken`` are the keys that the kernel took in the place of
    the recorded ones; ``after`` happens between the store and the look at its pages, which tells ``seen`` rows. The
    rows may be a ``draft``, and the record has a row of padding in slot ``pad``, which the kernel skips.
    """
    scene = Scene(folder, format=format, keep=keep)
    if earlier:
        scene.earlier([21, 22, 23], [5, 6, 7])
    job = Job(7000, 0, ROWS, [21, 22, 23] if factor == 1 else [10, 20, 22], [5, 6, 7])
    scene.start(job)
    scene.announce(job)
    p, spec = scene.prefill, layout(format)
    rng = np.random.default_rng(7)
    keys = rng.standard_normal((ROWS, 128)).astype(np.float32)
    keys += (common * np.random.default_rng(6).standard_normal(128)).astype(np.float32)
    weight = (1 + 0.2 * rng.standard_normal(128)).astype(np.float32)
    positions = np.arange(ROWS)
    before = p.memory[0].copy()
    slots = scene.write(p, job, 0, ROWS)
    p.memory[0][:] = before
    store_torch(
        spec,
        torch.from_numpy(p.memory[0]),
        torch.from_numpy(slots // spec.rows * factor * spec.rows + slots % spec.rows),
        torch.from_numpy(taken(keys) if taken else keys),
        torch.from_numpy(rope_rows(positions + shift)),
        torch.from_numpy(weight),
        EPSILON,
    )
    for row, amount in (wrong or {}).items():
        page, inside = divmod(row, spec.rows)
        p.memory[0][job.prefill[page], inside * spec.value_bytes] ^= np.uint8(amount)
    step = scene.step()
    more: dict[str, Any] = {}
    if inputs:
        p.emit("store_params", params=1, norm_weight=weight, epsilon=EPSILON)
        more = {"keys": keys, "rope": rope_rows(positions), "params": 1, "draft": draft}
    if pad is not None:
        more["keys"], more["rope"] = (
            np.concatenate([more[name], more[name][:1]]) for name in ("keys", "rope")
        )
        more["logical_rows"] = more["positions"] = [*range(ROWS), -1]
        slots = np.append(slots, pad)
    scene.tell_store(p, job, 0, slots, step, **more)
    if after:
        after(scene)
    scene.seen_stored(p, job, 0, seen, step)
    scene.send(job)
    scene.arrive(job)
    scene.look("LT", job)
    scene.read(job)
    return scene


@FORMATS
def test_a_right_store_is_reproduced_and_cleared(tmp_path: Path, format: str) -> None:
    verdict = verdict_of(stored(tmp_path, format))
    expect_clean(verdict)
    assert "store" in verdict.cleared


@FORMATS
def test_a_store_without_inputs_is_not_cleared(tmp_path: Path, format: str) -> None:
    verdict = verdict_of(stored(tmp_path, format, inputs=False))
    expect_clean(verdict)
    assert "store" not in verdict.cleared


@FORMATS
def test_rows_that_the_store_does_not_give_are_wrong_store_bytes(tmp_path: Path, format: str) -> None:
    # fp8 and bf16: bits of the exponent; fp4: both codes of the first byte.
    verdict = verdict_of(stored(tmp_path, format, wrong=dict.fromkeys((3, 70, 71), 0x35)))
    (finding,) = expect(verdict, "F30", "wrong-store-bytes", "store", room=7000, role="prefill")
    assert [(page.logical, page.physical, page.value_rows) for page in finding.pages] == [
        (0, 21, ((3, 3),)),
        (1, 22, ((6, 7),)),
    ]
    assert "store" not in verdict.cleared


@FORMATS
def test_a_store_with_the_position_of_another_token_is_wrong_store_bytes(tmp_path: Path, format: str) -> None:
    verdict = verdict_of(stored(tmp_path, format, shift=1))
    (finding,) = expect(verdict, "F30", "wrong-store-bytes", "store", room=7000)
    assert [page.logical for page in finding.pages] == [0, 1, 2]


@FORMATS
def test_wrong_bytes_without_inputs_accuse_nobody(tmp_path: Path, format: str) -> None:
    verdict = verdict_of(stored(tmp_path, format, wrong={3: 0x35}, inputs=False))
    assert verdict.findings == ()


@FORMATS
@pytest.mark.parametrize("wrong", [None, {3: 0x35}], ids=["right", "wrong"])
def test_inputs_without_bytes_clear_and_accuse_nothing_else(
    tmp_path: Path, format: str, wrong: dict[int, int] | None
) -> None:
    """Digests alone can't say that a store is near enough; at most that it is the same."""
    verdict = verdict_of(stored(tmp_path, format, wrong=wrong, keep="digests"))
    assert {finding.code for finding in verdict.findings} <= ({"F30"} if wrong else set())
    if wrong:
        assert "store" not in verdict.cleared


@FORMATS
def test_rows_that_lie_at_twice_their_page_are_a_wrong_stride(tmp_path: Path, format: str) -> None:
    """Pages 10 and 20: the rows of the first lie in the second. Nobody looks at 40 and 44, where the others lie."""
    verdict = verdict_of(stored(tmp_path, format, factor=2))
    found = {(f.code, f.confidence): [page.logical for page in f.pages] for f in verdict.findings}
    assert found == {("F20", "certain"): [0, 1], ("unclassified", "likely"): [2]}
    assert {finding.stage for finding in verdict.findings} == {"store"}


def blurred(keys: F32) -> F32:
    """Keys that keep most of their direction, and few of their codes."""
    return (keys + 0.4 * np.random.default_rng(8).standard_normal(keys.shape)).astype(np.float32)


def blurred_row(keys: F32) -> F32:
    """Keys of which one is blurred: that it is nearest to its own place may be an accident."""
    found = keys.copy()
    found[3] = blurred(keys)[3]
    return found


def foreign(keys: F32) -> F32:
    """Keys of nobody."""
    return np.random.default_rng(9).standard_normal(keys.shape).astype(np.float32)


@FORMATS
@pytest.mark.parametrize("how", [{"wrong": {3: 0x35}}, {"taken": blurred}], ids=["mostly right", "nearest"])
def test_rows_that_are_the_stores_own_are_wrong_bytes_in_a_page_that_nobody_saw_before(
    tmp_path: Path, format: str, how: dict[str, Any]
) -> None:
    verdict = verdict_of(stored(tmp_path, format, earlier=False, **how))
    expect(verdict, "F30", "wrong-store-bytes", "store", room=7000, role="prefill")


@FORMATS
@pytest.mark.parametrize("taken", [foreign, blurred_row])
def test_rows_that_may_be_old_are_not_certain_in_a_page_that_nobody_saw_before(
    tmp_path: Path, format: str, taken: Callable[[F32], F32]
) -> None:
    verdict = verdict_of(stored(tmp_path, format, earlier=False, taken=taken))
    assert {(f.code, f.confidence) for f in verdict.findings} == {("F30", "likely")}


def alike(keys: F32) -> F32:
    """Keys of nobody, that have in common with the right ones what these have in common."""
    return np.asarray(foreign(keys) + keys.mean(axis=0), np.float32)


def biased(keys: F32) -> F32:
    """Keys that are all off by the same."""
    return np.asarray(keys + 20 * np.random.default_rng(5).standard_normal(128), np.float32)


@pytest.mark.parametrize(
    ("taken", "common", "confidence"), [(alike, 4.0, "likely"), (biased, 0.0, "certain")]
)
def test_what_all_keys_have_in_common_says_nothing_of_whose_they_are(
    tmp_path: Path, taken: Callable[[F32], F32], common: float, confidence: str
) -> None:
    """Keys of one layer are much alike, and those at the same positions are rotated alike."""
    verdict = verdict_of(stored(tmp_path, "fp8", earlier=False, taken=taken, common=common))
    assert {(f.code, f.confidence) for f in verdict.findings} == {("F30", confidence)}


@FORMATS
@pytest.mark.parametrize("ordered", [False, True])
def test_a_padding_row_in_the_stores_page_is_certain_only_in_its_order(
    tmp_path: Path, format: str, ordered: bool
) -> None:
    """The padding row is stored by another thread; ``ordered``: by the same."""

    def padding(scene: Scene) -> None:
        padded(scene.prefill, 0, [22 * 64 + 9], 5, thread=0 if ordered else 3)

    verdict = verdict_of(stored(tmp_path, format, after=padding))
    (finding,) = expect(
        verdict,
        "F23",
        "padding-row-written",
        "store",
        room=7000,
        confidence="certain" if ordered else "likely",
    )
    assert [(page.logical, page.value_rows) for page in finding.pages] == [(1, ((9, 9),))]


@FORMATS
@pytest.mark.parametrize("other", [False, True], ids=["its own write", "another request's"])
def test_a_row_that_its_request_wrote_again_before_the_look_is_not_judged(
    tmp_path: Path, format: str, other: bool
) -> None:
    """Drafts are written anew: the look shows the later store. Another request's write over a row is a fault."""

    def again(scene: Scene) -> None:
        scene.prefill.emit(
            "store",
            room=8000 if other else 7000,
            buffer=scene.prefill.buffer(0),
            slots=[21 * 64 + 3],
            positions=[3],
            logical_rows=[3],
        )

    verdict = verdict_of(stored(tmp_path, format, wrong=dict.fromkeys((3, 70), 0x35), after=again))
    (finding,) = [finding for finding in verdict.findings if finding.code == "F30"]
    rows = {page.logical: page.value_rows for page in finding.pages}
    assert rows == ({0: ((3, 3),)} if other else {}) | {1: ((6, 6),)}
    assert verdict.scope["stores"]["skipped"] == ({} if other else {GONE: 1})
    assert verdict.scope["stores"]["rows"] == ROWS - (not other)


@FORMATS
@pytest.mark.parametrize("draft", [False, True], ids=["rows", "drafts"])
def test_a_draft_that_was_not_accepted_is_not_judged(tmp_path: Path, format: str, draft: bool) -> None:
    """The look at the pages tells that the request has 145 rows: drafts beyond are nobody's rows."""
    scene = stored(tmp_path, format, wrong=dict.fromkeys((140, 147), 0x35), seen=145, draft=draft)
    (finding,) = [finding for finding in verdict_of(scene).findings if finding.code == "F30"]
    rows = {page.logical: page.value_rows for page in finding.pages}
    assert rows == {2: ((12, 12),) if draft else ((12, 12), (19, 19))}


@FORMATS
@pytest.mark.parametrize("slot", [-1, 21 * 64 + 5])
def test_padding_rows_of_a_store_are_not_done_again(tmp_path: Path, format: str, slot: int) -> None:
    """The record of a padded batch has inputs for the padding, too; the row that it may name is the request's."""
    scene = stored(tmp_path, format, wrong={3: 0x35}, pad=slot)
    verdict = verdict_of(scene)
    (finding,) = [finding for finding in verdict.findings if finding.code == "F30"]
    assert [(page.logical, page.value_rows) for page in finding.pages] == [(0, ((3, 3),))]
    assert verdict.scope["stores"]["skipped"] == {}
