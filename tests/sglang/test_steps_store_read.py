"""Hooks on passes, stores and reads around a fake engine (CPU tensors, twins as kernels): the record replays."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from capture_hooks.events import Hook, Process, Request
from capture_hooks.journal import JournalReader
from capture_hooks.options import Options
from capture_hooks.recorder import Recorder

torch = pytest.importorskip("torch")
from capture_hooks.adapters.sglang.plans import Span, written_rows  # noqa: E402
from capture_hooks.adapters.sglang.read import ReadHooks  # noqa: E402
from capture_hooks.adapters.sglang.requests import room_of  # noqa: E402
from capture_hooks.adapters.sglang.sampled import E4M3, request_rows  # noqa: E402
from capture_hooks.adapters.sglang.step_pages import runs, written_pages  # noqa: E402
from capture_hooks.adapters.sglang.steps import Steps, ints  # noqa: E402
from capture_hooks.adapters.sglang.store import OTHERS, StoreHooks  # noqa: E402
from capture_hooks.adapters.sglang.versions import REPLACED  # noqa: E402
from replay.judge import judge  # noqa: E402
from replay.trace.reader import open_trace  # noqa: E402
from replay.verdict import Verdict  # noqa: E402
from tests.sglang.fake_engine import FakeEngine  # noqa: E402
from tests.sglang.fake_hooks import drain, hook  # noqa: E402


def run(folder: Path, wrong: dict[str, Any] | None = None, kernel: str = "", **options: Any) -> Verdict:
    """Two requests prefill in chunks, then decode together; the verdict on the trace."""
    recorder = Recorder(
        Options(capture=folder, mode="full", seal=False, read_every=16, **options), Process(role="server")
    )
    engine = FakeEngine(recorder, seed=7)
    hook(engine, *([kernel] if kernel else []))
    first, second = engine.start(16, 421, 3), engine.start(9, 90, 5)
    for req in (first, second):
        recorder.emit(Request(req.bootstrap_room, 0, "start", rows=10**6))
        recorder.emit(Request(req.bootstrap_room, 0, "arrived"))
    engine.step([first], [300])
    engine.step([second, first], [90, 121])
    engine.wrong = wrong or {}
    for _ in range(40):
        engine.step([first, second], None)
    drain(recorder)
    recorder.close()
    with open_trace(folder) as trace:
        return judge(trace)


def test_a_right_engine_is_clean_and_its_stores_and_reads_were_done_again(tmp_path: Path) -> None:
    verdict = run(tmp_path)
    assert verdict.verdict == "clean", (verdict.findings, verdict.not_judged)
    stores, reads = verdict.scope["stores"], verdict.scope["reads"]
    assert stores["rows"] == stores["rows_reproduced"] >= 2 * (421 // 4 + 90 // 4 + 20)
    assert reads["judged"] >= 2 * 2 * 3
    assert not stores["skipped"]
    assert verdict.scope["tables"] > 0


@pytest.mark.parametrize(
    ("wrong", "code"),
    [("store", "F30"), ("logits", "F25"), ("top-k", "F27")],
    ids=["store", "logits", "top-k"],
)
def test_a_wrong_kernel_is_named(tmp_path: Path, wrong: str, code: str) -> None:
    verdict = run(tmp_path, {wrong: True})
    assert verdict.verdict == "divergent"
    assert {finding.code for finding in verdict.findings} == {code}


def test_logits_of_a_kernel_that_rounds_to_16_bits_are_not_held_against_the_bound_of_fp32(
    tmp_path: Path,
) -> None:
    verdict = run(tmp_path, {"logits": True}, kernel="read_torch")
    assert not verdict.findings
    assert verdict.scope["reads"]["judged"] == 0
    with open_trace(tmp_path) as trace:
        reads = trace.table("read")
        assert (reads.bulk_size("query") > 0).any()
        assert not (reads.bulk_size("logits") > 0).any()


def test_a_plain_server_knows_a_request_from_its_first_pass_to_its_release(tmp_path: Path) -> None:
    """Nobody announces a request there: no sender, no receiver, and mostly no room."""
    recorder = Recorder(Options(capture=tmp_path, mode="full", seal=False), Process(role="server"))
    engine = FakeEngine(recorder)
    hook(engine)
    req = SimpleNamespace(
        rid="a", bootstrap_room=None, origin_input_ids=[0] * 300, req_pool_idx=1, row=1, length=0, pages=[],
        finished_reason=type("FINISH_LENGTH", (), {})(),
    )  # fmt: skip
    engine.step([req], [300])
    for _ in range(5):
        engine.step([req], None)
    drain(recorder)
    engine.session.scheduler._released(req)
    recorder.close()
    room = room_of(req)
    with open_trace(tmp_path) as trace:
        requests, frees = trace.table("request"), trace.table("free")
        assert [(int(r), str(p), int(n)) for r, p, n in
                zip(requests["room"], requests["phase"], requests["tokens"], strict=True)] == [
            (room, "start", 300), (room, "finish", -1)
        ]  # fmt: skip
        assert set(trace.table("store")["room"].tolist()) == {room}
        assert set(trace.table("read")["room"].tolist()) == {room}
        assert frees["room"].tolist() == [room]
        verdict = judge(trace)
    assert verdict.verdict == "clean", (verdict.findings, verdict.not_judged)
    assert verdict.scope["stores"]["rows_reproduced"] >= 2 * (300 // 4)


def test_a_row_of_the_request_table_is_told_with_the_generation_it_was_given_in(tmp_path: Path) -> None:
    recorder = Recorder(Options(capture=tmp_path, mode="full", seal=False), Process(role="prefill"))
    engine = FakeEngine(recorder)
    engine.session.role = "prefill"
    rows = engine.session.table_rows
    hook(engine)
    first, second = engine.start(16, 600, 3), engine.start(9, 90, 5)
    first.req_pool_idx, second.req_pool_idx = 3, 5
    rows.given([3, 5])
    engine.step([first, second], [300, 90])
    engine.step([first], [300])  # its next chunk stays in its row
    engine.step([first], None)
    third = engine.start(17, 40, 3)
    third.req_pool_idx = 3
    rows.given([3])
    engine.step([third], [40])
    fourth = engine.start(18, 40, 7)
    fourth.req_pool_idx = 7  # no hook saw who gave it this one
    engine.step([fourth], [40])
    drain(recorder)
    recorder.close()
    with open_trace(tmp_path) as trace:
        table = trace.table("request")
        names = ("room", "phase", "rows", "req_pool_idx", "generation")
        assert list(zip(*(table[name].tolist() for name in names), strict=True)) == [
            (16, "start", 150, 3, 0), (9, "start", 22, 5, 0), (17, "start", 10, 3, 1), (18, "start", 10, 7, -1)
        ]  # fmt: skip


@pytest.mark.parametrize("alloc", ["new", "old"])
def test_rows_are_counted_when_they_are_handed_out_and_not_when_they_are_kept(
    tmp_path: Path, alloc: str
) -> None:
    recorder = Recorder(Options(capture=tmp_path, seal=False), Process(role="decode"))
    rows = FakeEngine(recorder).session.table_rows
    free = [1, 2]

    def hand_out(_: Any, reqs: list[Any]) -> list[int] | None:
        fresh = [req for req in reqs if req.req_pool_idx is None]
        if len(fresh) > len(free):
            return None
        for req in fresh:
            req.req_pool_idx = free.pop(0)
        if alloc == "new":
            rows.given([req.req_pool_idx for req in fresh])
        return [req.req_pool_idx for req in reqs]

    def given(*reqs: Any) -> list[tuple[int, int]]:
        if alloc == "new":
            hand_out(None, list(reqs))
        else:
            rows.alloc(recorder.guard("sglang.alloc"), hand_out, None, reqs=list(reqs))
        return [rows.of(req) for req in reqs]

    a, b, c = (SimpleNamespace(req_pool_idx=None) for _ in range(3))
    assert given(a, b) == [(1, 0), (2, 0)]
    assert given(c) == [(-1, -1)], "the table is full"
    free.append(a.req_pool_idx)
    assert given(c, b) == [(1, 1), (2, 0)]
    for _ in range(recorder.options.hook_errors):
        with recorder.guard("sglang.ReqToTokenPool.alloc"):
            raise ValueError
    assert rows.of(c) == (1, -1), "the count cannot be trusted any more"
    recorder.close()


def test_a_pass_that_replays_a_graph_closes_the_rungs_that_it_hides(tmp_path: Path) -> None:
    recorder = Recorder(Options(capture=tmp_path, mode="full", seal=False), Process(role="server"))
    engine = FakeEngine(recorder)
    steps = hook(engine)
    for name, what in (("store", "store"), ("read_deep_gemm", "read"), ("read_layer", "top-k")):
        recorder.hook(f"sglang.{name}", what)
        recorder.fired(f"sglang.{name}")
    req = engine.start(8, 40, 1)
    recorder.emit(Request(8, 0, "start", rows=10))
    engine.step([req], [40])
    engine.graph = True
    engine.step([req], None)
    engine.step([req], None)
    assert steps.graphs == 2
    assert steps.passed() == 3
    drain(recorder)
    recorder.close()
    with open_trace(tmp_path) as trace:
        verdict = judge(trace)
        hooks = trace.table("hook")
        notes = {
            str(n): (bool(c), str(t))
            for n, c, t in zip(hooks["name"], hooks["complete"], hooks["note"], strict=True)
        }
    assert verdict.verdict == "inconclusive"
    for name in ("store", "read_deep_gemm", "read_layer"):
        complete, note = notes[f"sglang.{name}"]
        assert not complete
        assert "CUDA graph" in note


@pytest.mark.parametrize("argument", list(OTHERS))
def test_a_writer_that_is_not_hooked_closes_the_rung_of_the_store(tmp_path: Path, argument: str) -> None:
    recorder = Recorder(Options(capture=tmp_path, mode="full", seal=False), Process(role="server"))
    engine = FakeEngine(recorder)
    engine.runner.server_args = SimpleNamespace(**{argument: True})
    hook(engine)
    recorder.hook("sglang.store", "store")
    recorder.hook("sglang.read_deep_gemm", "read")
    engine.step([engine.start(8, 40, 1)], [40])
    drain(recorder)
    recorder.close()
    with open_trace(tmp_path) as trace:
        hooks = trace.table("hook")
        notes = [
            str(note)
            for name, note in zip(hooks["name"], hooks["note"], strict=True)
            if name == "sglang.store"
        ]
        verdict = judge(trace)
    assert argument in notes[-1]
    covered = verdict.coverage["server rank 0"]["covered"]
    assert "store" not in covered
    assert ("read" in covered) == (argument != REPLACED)


@pytest.mark.parametrize("way", ["none", "setter", "pack", "pack by place", "pack into no cache", "layer",
                                 "latent layer", "resumed"])  # fmt: skip
def test_what_passes_a_hook_by_closes_its_rung(tmp_path: Path, way: str) -> None:
    recorder = Recorder(Options(capture=tmp_path, seal=False), Process(role="server"))
    engine = FakeEngine(recorder)
    session: Any = engine.session
    steps = Steps(session)
    stores = StoreHooks(session, steps)
    ReadHooks(session, steps)
    for name, what in (("store", "store"), ("read_deep_gemm", "read"), ("read_layer", "top-k")):
        recorder.hook(f"sglang.{name}", what)
    step: Any = SimpleNamespace(stores=set())
    steps.now = step
    if way == "setter":
        stores.tripwire("set_index_k_fused")()
    elif way.startswith("pack"):
        given = {"pack": {"cache": 1}, "pack into no cache": {"cache": None}}.get(way, {})
        stores.packs("index_k_rope_pack")(*range(7 if way == "pack by place" else 3), **given)
    elif way == "resumed":  # decode gave its pages back, and loads them again by itself
        req = engine.start(8, 40, 1)
        session.requests.close(req.held)
        session.role, engine.reqs, steps.now = "decode", [req], None
        engine.step([req], [40])
        steps._batch = [req]
        assert steps._rows(engine.batch)[0] == []
    elif "layer" in way:
        stores.layer(lambda **_: None, compressor=SimpleNamespace(is_in_indexer=way == "layer"))
    recorder.close()
    with JournalReader(recorder.path) as journal:
        last = {event.name: event.complete for _, event in journal if isinstance(event, Hook)}
    assert last == {
        "sglang.store": way not in ("setter", "pack", "pack by place", "layer", "resumed"),
        "sglang.read_deep_gemm": way != "resumed",
        "sglang.read_layer": way != "resumed",
    }


def test_mode_digest_keeps_no_bytes_and_reads_are_still_compared(tmp_path: Path) -> None:
    recorder = Recorder(Options(capture=tmp_path, mode="digest", seal=False), Process(role="server"))
    engine = FakeEngine(recorder)
    hook(engine)
    req = engine.start(8, 300, 1)
    recorder.emit(Request(8, 0, "start", rows=10**6))
    engine.step([req], [300])
    engine.step([req], None)
    drain(recorder)
    recorder.close()
    with open_trace(tmp_path) as trace:
        verdict = judge(trace)
        assert not trace.contents.has_data.any()
        assert not (trace.table("store").bulk_size("keys") > 0).any()
    assert verdict.scope["read_snapshots"] > 0
    assert not verdict.findings


def test_rows_of_a_decode_plan() -> None:
    words = np.zeros((5, 4), np.uint32)
    words[:, 0] = [8, 9, 12, 0, 16]
    slots = np.array([70, 0, 5, 0, 9])
    spans = [Span(0, 0, 7, 8), Span(1, 1, 8, 9), Span(2, 2, 11, 12)]
    found = written_rows(words.view(np.uint8), slots, spans, decode=True, ratio=4)
    assert found.owner.tolist() == [0, 2]  # 9 is no multiple of 4, row 4 is nobody's
    assert found.slot.tolist() == [70, 5]
    assert found.position.tolist() == [4, 8]
    assert found.row.tolist() == [1, 2]


def test_rows_of_a_prefill_plan_in_any_order_with_padding_and_state_words() -> None:
    words = np.zeros((5, 4), np.uint32)
    words[:, 0] = [4, 0xFFFFFFFF, 204, 8, 200]
    words[:, 1] = np.array([3, 0, 14, 7, 10]) | (5 << 16)
    slots = np.arange(100, 116)
    spans = [Span(0, 0, 0, 9), Span(3, 9, 198, 205)]
    found = written_rows(words.view(np.uint8), slots, spans, decode=False, ratio=4)
    assert found.plan.tolist() == [0, 2, 3, 4]
    assert found.of(0).row.tolist() == [0, 1]
    assert found.of(0).slot.tolist() == [103, 107]
    assert found.of(3).row.tolist() == [49, 50]
    assert found.of(3).slot.tolist() == [110, 114]
    assert found.of(3).position.tolist() == [196, 200]


def test_a_plan_that_names_another_position_than_the_batch_is_told_as_it_is() -> None:
    words = np.zeros((1, 4), np.uint32)
    words[0, 0] = 12
    found = written_rows(words.view(np.uint8), np.array([7]), [Span(0, 0, 7, 8)], decode=True, ratio=4)
    assert (found.position[0], found.row[0]) == (8, 1)


@pytest.mark.parametrize(
    ("before", "length", "pages"),
    [
        (0, 3, []),
        (0, 4, [0]),
        (0, 255, [0]),
        (0, 257, [0]),
        (0, 260, [0, 1]),
        (255, 256, [0]),
        (256, 260, [1]),
    ],
)
def test_pages_that_a_pass_writes(before: int, length: int, pages: list[int]) -> None:
    assert list(written_pages(before, length, 4, 256)) == pages


def test_slots_become_rows_of_the_request() -> None:
    found = request_rows(np.array([64 * 9 + 3, -1, 64 * 4, 64 * 77]), np.array([4, 9]), 64)
    assert found.tolist() == [67, -1, 0, -2]


def test_pages_of_a_prefix_and_pages_that_replace_others_are_shared() -> None:
    news = [(0, 5), (1, 6), (2, 7), (3, 9)]
    assert runs(news, 2, {}) == [(0, [5, 6], True), (2, [7, 9], False)]
    assert runs([(2, 8)], 0, {2: 7}) == [(2, [8], True)]


def test_a_page_that_replaces_one_between_the_last_pass_and_the_send_is_told_as_shared(
    tmp_path: Path,
) -> None:
    """The prefix tree takes the last chunk in before it is sent: no pass comes any more that would tell the page."""
    recorder = Recorder(Options(capture=tmp_path, mode="pages", seal=False), Process(role="prefill"))
    engine = FakeEngine(recorder)
    steps = hook(engine)
    other, req = engine.start(8, 600, 2), engine.start(9, 600, 3)
    engine.step([other], [600])
    engine.step([req], [600])
    held, own, theirs = req.held, list(req.pages), other.pages[1]
    # At once, before anything of the pass has arrived on the host.
    steps.sent(held, 0, np.array([own[0], theirs, own[2]]), shared=True)
    recorder.emit(Request(9, 0, "finish"))
    drain(recorder)
    recorder.close()
    assert held.pages == {0: own[0], 1: theirs, 2: own[2]}
    with open_trace(tmp_path) as trace:
        alloc, looks, ends = trace.table("alloc"), trace.table("snapshot"), trace.table("request")
        mine = np.flatnonzero(alloc["room"] == 9).tolist()
        told = [
            (int(alloc["logical"][n]), alloc.ragged("pages")[n].tolist(), bool(alloc["shared"][n]))
            for n in mine
        ]
        assert sorted(told, key=lambda item: item[2]) == [(0, own, False), (1, [theirs], True)]
        by_shared = {shared: int(alloc["seq"][n]) for n, (_, _, shared) in zip(mine, told, strict=True)}
        assert by_shared[False] < looks["seq"].max() < by_shared[True] < ends["seq"].max()


def test_pages_that_a_pass_could_not_tell_are_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(Options(capture=tmp_path, mode="pages", seal=False), Process(role="prefill"))
    engine = FakeEngine(recorder)
    hook(engine)
    req = engine.start(9, 600, 3)
    monkeypatch.setattr("capture_hooks.taps.device.PinnedRing.take", lambda *_: None)
    engine.step([req], [600])
    recorder.close()
    with open_trace(tmp_path) as trace:
        loss = trace.table("loss")
        assert {str(what): int(n) for what, n in zip(loss["what"], loss["count"], strict=True)}["alloc"] == 1


def test_lengths_on_a_device_are_not_asked_for() -> None:
    assert ints([1, 2]) == [1, 2]
    assert ints(torch.tensor([3, 4])) == [3, 4]
    assert ints(torch.empty(2, device="meta")) == []
    assert ints(None) == []


def test_query_codes_are_decoded_as_the_format_says() -> None:
    from replay.kernels import formats

    assert np.array_equal(E4M3.astype(np.float64), formats.E4M3, equal_nan=True)
