"""Reads of gathered keys: the copy and its logits are one kernel, and replay as a read by pages does."""

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
from capture_hooks.taps.pages import device_tap

torch = pytest.importorskip("torch")
from capture_hooks.adapters.sglang.gathered import GatheredHooks  # noqa: E402
from capture_hooks.adapters.sglang.read import ReadHooks  # noqa: E402
from capture_hooks.adapters.sglang.steps import Steps  # noqa: E402
from replay.judge import judge  # noqa: E402
from replay.trace.reader import open_trace  # noqa: E402
from replay.verdict import Verdict  # noqa: E402
from tests.sglang.fake_engine import FakeEngine  # noqa: E402
from tests.sglang.fake_gathered import FakeGather  # noqa: E402
from tests.sglang.fake_hooks import drain, hook  # noqa: E402

PASSES = [
    ([0], [300]),
    ([1, 0], [450, 121]),
    ([1], [70]),
]  #: (requests, tokens), the last ones after a prefix


def run(
    folder: Path, *, wrong: str = "", compressed: bool = False, top_k: bool = False, rows_per_call: int = 0,
    kernel: str = "read_gathered", between: Any = None,
) -> Verdict:  # fmt: skip
    """Two requests prefill in chunks by gathered keys, then decode by pages; the verdict on the trace."""
    recorder = Recorder(
        Options(capture=folder, mode="full", seal=False, read_every=1, store_every=1), Process(role="server")
    )
    engine = FakeEngine(recorder, seed=7)
    hook(engine)
    gather = FakeGather(engine, compressed=compressed, rows_per_call=rows_per_call)
    gather.hook(engine.session.reads, kernel)
    gather.wrong = wrong
    gather.between = between or gather.between
    engine.wrong = {"top-k": top_k}
    reqs = [engine.start(16, 421, 3), engine.start(9, 520, 5)]
    for req in reqs:
        recorder.emit(Request(req.bootstrap_room, 0, "start", rows=10**6))
        recorder.emit(Request(req.bootstrap_room, 0, "arrived"))
    for who, tokens in PASSES:
        if compressed:
            for one, count in zip(who, tokens, strict=True):
                engine.step([reqs[one]], [count])
        else:
            engine.step([reqs[one] for one in who], tokens)
    engine.wrong = {}
    for _ in range(3):
        engine.step(reqs, None)
    drain(recorder)
    recorder.close()
    with open_trace(folder) as trace:
        return judge(trace)


def v4(folder: Path) -> tuple[Recorder, FakeEngine]:
    """An engine whose prefills gather their keys as V4's do, with the hooks in it."""
    recorder = Recorder(
        Options(capture=folder, mode="full", seal=False, store_every=1), Process(role="server")
    )
    engine = FakeEngine(recorder)
    hook(engine)
    FakeGather(engine, compressed=True).hook(engine.session.reads)
    return recorder, engine


def read_rows(folder: Path) -> list[tuple[int, int, int]]:
    """(room, rows, logits) of each read of gathered keys in the first layer."""
    with open_trace(folder) as trace:
        reads = trace.table("read")
        return [
            (int(reads["room"][n]), int(reads["rows"][n]), len(reads.bulk("logits", n)))
            for n in range(len(reads))
            if str(reads["kernel"][n]).endswith("fp8_mqa_logits") and int(reads["buffer"][n]) == 0
        ]


@pytest.mark.parametrize("rows_per_call", [0, 100], ids=["one call", "calls by rows"])
@pytest.mark.parametrize("compressed", [True, False], ids=["V4", "V3.2"])
def test_right_reads_are_clean_and_were_done_again(
    tmp_path: Path, compressed: bool, rows_per_call: int
) -> None:
    verdict = run(tmp_path, compressed=compressed, rows_per_call=rows_per_call)
    assert verdict.verdict == "clean", (verdict.findings, verdict.not_judged)
    lengths = [75, 112, 105, 130]
    assert read_rows(tmp_path) == [(room, n, n) for room, n in zip([16, 9, 16, 9], lengths, strict=True)]
    reads = verdict.scope["reads"]
    assert not reads["skipped"]
    assert reads["rows"] == reads["rows_reproduced"] > 2 * sum(lengths)


@pytest.mark.parametrize(
    ("wrong", "compressed"),
    [("logits", True), ("logits", False), ("gather", True), ("gather", False), ("start", False)],
)
def test_a_wrong_copy_and_wrong_logits_are_named_at_the_read(
    tmp_path: Path, wrong: str, compressed: bool
) -> None:
    verdict = run(tmp_path, wrong=wrong, compressed=compressed)
    assert verdict.verdict == "divergent"
    assert {finding.stage for finding in verdict.findings} == {"read-kernel"}
    if wrong == "logits":
        assert {(finding.code, finding.confidence) for finding in verdict.findings} == {("F25", "certain")}
    rooms = {finding.request.room for finding in verdict.findings}
    assert rooms == ({16} if wrong == "start" else {16, 9})


def test_a_wrong_top_k_is_named(tmp_path: Path) -> None:
    verdict = run(tmp_path, compressed=True, top_k=True)
    assert {(finding.code, finding.stage) for finding in verdict.findings} == {("F27", "top-k")}


def test_what_becomes_of_pages_once_they_were_gathered_is_no_part_of_the_read(tmp_path: Path) -> None:
    """Their bytes are others while the copy is scored: neither is the read told as torn nor its logits as wrong."""
    changed = []

    def between(buffer: Any, pages: Any) -> None:
        page = buffer[int(pages[0, 0])]
        kept = page.clone()
        page[:8192] = 255 - page[:8192]
        changed.append((page, kept))

    def put_back(*_: Any) -> None:
        for page, kept in changed:
            page.copy_(kept)

    recorded = FakeGather.fake_score

    def score(self: Any, *args: Any, **keywords: Any) -> Any:
        found = recorded(self, *args, **keywords)
        put_back()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeGather, "fake_score", score)
        verdict = run(tmp_path, between=between)
    assert len(changed) == 2 * len(PASSES)
    assert verdict.verdict == "clean", (verdict.findings, verdict.not_judged)
    assert not verdict.scope["reads"]["skipped"]


def test_a_row_that_takes_every_key_has_no_logits(tmp_path: Path) -> None:
    recorder, engine = v4(tmp_path)
    engine.step([engine.start(8, 100, 1)], [100])  # 25 rows, of which the top 32 are wanted
    drain(recorder)
    recorder.close()
    assert read_rows(tmp_path) == [(8, 25, 0)]
    with open_trace(tmp_path) as trace:
        assert not judge(trace).findings


def test_logits_that_were_rounded_to_16_bits_are_not_kept(tmp_path: Path) -> None:
    verdict = run(tmp_path, wrong="logits", kernel="read_gathered_torch")
    assert not verdict.findings
    with open_trace(tmp_path) as trace:
        reads = trace.table("read")
        mine = reads["kernel"] == "torch"
        assert mine.sum() == 2 * 4
        assert (reads.bulk_size("query")[mine] > 0).all()
        assert not reads.bulk_size("logits")[mine].any()


WAYS = {
    "": "",
    "another layer": "by a layer that is not hooked",
    "other memory": "not in the inventory",
    "part of a batch": "a part of a batch",
    "decode": "a part of a batch",
    "twice": "twice before they were read",
    "unread": "read by a function that is not hooked",
    "unread rows": "a part of a pass",
    "another copy": "whose gather was not seen",
    "no gather": "whose gather was not seen",
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_not_followed_closes_the_rung(tmp_path: Path, way: str) -> None:
    recorder = Recorder(Options(capture=tmp_path, seal=False), Process(role="server"))
    engine = FakeEngine(recorder)
    session: Any = engine.session
    steps = session.steps = Steps(session)
    reads = ReadHooks(session, steps)
    recorder.hook("sglang.read_deep_gemm", "read")
    hooks, gather = GatheredHooks(session, reads), FakeGather(engine, compressed=False)
    engine.grow(req := engine.start(8, 300, 1), 300)
    tap = device_tap(recorder, engine.tensors[0].device)
    assert tap is not None
    from capture_hooks.adapters.sglang.step import Row
    from capture_hooks.taps.device import Job

    step: Any = SimpleNamespace(
        extend=way != "decode", rows=[Row(0, req.held, 0, 300, 0)], line=0, job=Job(), parts=[], extra={},
        queries=300,
    )  # fmt: skip
    steps.now, steps._tap, steps._batch = step, tap, [req] * (2 if way == "part of a batch" else 1)

    def copied() -> Any:
        buffer = engine.tensors[0].clone() if way == "other memory" else engine.tensors[0]
        pages, rows = torch.tensor([req.pages], dtype=torch.int32), torch.tensor([75], dtype=torch.int32)
        return hooks.gather(
            gather.fake_gather, None, None, buffer, page_indices=pages, seq_len_tensor=rows, seq_len_sum=75,
            max_seq_len=75,
        )  # fmt: skip

    def scored(kv: Any, count: int) -> None:
        hooks.kernel("read_gathered", "x")(
            gather.fake_score, torch.randn(count, 4, 128).to(torch.float8_e4m3fn), kv, torch.rand(count, 4),
            torch.zeros(count, dtype=torch.int32), torch.full((count,), 75, dtype=torch.int32),
        )  # fmt: skip

    def layer() -> None:
        if way == "another layer":
            reads.now = None
        if way == "no gather":
            kv = gather.fake_gather(
                None, None, engine.tensors[0], torch.tensor([req.pages]), torch.tensor([75]), 75, 75
            )
        else:
            kv = copied()
        if way == "twice":
            kv = copied()
        if way == "another copy":
            kv = tuple(part.clone() for part in kv)
        if way != "unread":
            scored(kv, 100 if way == "unread rows" else 300)

    reads.plain_layer(layer)
    recorder.close()
    with JournalReader(recorder.path) as journal:
        last = [event for _, event in journal if isinstance(event, Hook)][-1]
    assert (last.complete, WAYS[way] in last.note) == (not way, True), last.note
    assert len(step.parts) == (0 if way else 1), "nothing is recorded of what is not followed"


def test_what_the_pass_was_given_is_not_held_in_memory(tmp_path: Path) -> None:
    """The query of a long prompt is large: what is put by is a copy of one row."""
    recorder, engine = v4(tmp_path)
    sizes: list[int] = []
    submit = type(device_tap(recorder, engine.tensors[0].device)).submit

    def watched(tap: Any, job: Any, *args: Any) -> Any:
        sizes.extend(part.untyped_storage().nbytes() for part in job.parts)
        return submit(tap, job, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("capture_hooks.taps.device.DeviceTap.submit", watched)
        engine.step([engine.start(8, 400, 1)], [400])
    recorder.close()
    assert np.max(sizes) < 400 * 4 * 128
