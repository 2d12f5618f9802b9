"""V3.2 in SGLang 0.5.23: its own pool, indexer methods and managers, one row of index-K a token in pages of 64.

Stores go down to the pool's setter (this device has no fused kernel), reads to twins of DeepGEMM's functions: of
gathered keys in a prefill, by pages in a decode pass. The top-k of this model is not recorded, and a store's inputs are
not kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from capture_hooks.events import (
    Buffer,
    Hook,
    Read,
    Receive,
    Request,
    Send,
    Snapshot,
    Store,
    TransferState,
)
from replay.cli import run
from replay.judge import JudgeOptions, judge
from replay.trace.reader import open_trace
from tests.integration import sglang_pair
from tests.integration.lab_rounds import journals, of, written
from tests.integration.test_sglang_pair import looks

VERSION = "0.5.23"
OPTIONS = {
    "KV_REPLAY_LATER_MS": "30", "KV_REPLAY_STORE_EVERY": "1", "KV_REPLAY_READ_EVERY": "1",
}  # fmt: skip
SPARSE: dict[str, Any] = {"kind": "sglang_sparse:Sparse", "state": True}
PREPARED = SPARSE | {"kind": "sglang_sparse:Prepared"}

pytestmark = [
    pytest.mark.skipif(bool(sglang_pair.why_not(VERSION)), reason=sglang_pair.why_not(VERSION)),
    pytest.mark.timeout(600),
]


def serve(
    pair: sglang_pair.Pair, room: int, source: list[int], destination: list[int], wrong: str = ""
) -> list[bytes]:
    """A prompt of 150 tokens: computed in two passes, sent in two chunks, then two tokens are decoded.

    Returns the bytes that were sent, one string a layer. ``wrong`` is a fault: "source", or a way of ``cross``.
    """
    for end in (pair.prefill, pair.decode):
        end.serve()
    pair.decode.receive(room=room, pages=destination[:3])
    assert pair.prefill.open(room=room, pages=3) == 2
    pair.prefill.start(room=room, row=1, pages=source, before=2)
    first = pair.prefill.step(room=room, tokens=100, read=True)
    assert first == [source[i // 64] * 64 + i % 64 for i in range(100)]
    pair.prefill.send_all(room=room, pages=source[:1], tokens=64, states=None)
    pair.prefill.step(room=room, tokens=50, read=True)  # goes on in the page whose main cache is not sent yet
    pair.prefill.settle()
    if wrong == "source":
        pair.prefill.write(pages=source[1:2], seed=5)
    if wrong in ("layers", "pages"):
        pair.prefill.cross(way=wrong)
    sent: list[bytes] = pair.prefill.read(pages=source[:3])
    pair.prefill.send_all(room=room, pages=source[1:3], tokens=86, states=source[:3])
    assert pair.prefill.wait(room=room) == pair.decode.wait(room=room) == 4
    pair.looked()
    if wrong in ("", "source"):
        assert pair.decode.read(pages=destination[:3]) == sent
    pair.decode.start(room=room, row=2, pages=destination)
    pair.decode.step_from(room=room, length=150)
    pair.decode.admit(room=room)
    for _ in range(2):
        pair.decode.step(room=room, tokens=1, read=True)
    pair.decode.settle()
    pair.prefill.settle()
    return sent


def test_a_whole_request_is_clean(host: sglang_pair.Host, tmp_path: Path, capsys: Any) -> None:
    with host.pair(tmp_path, OPTIONS, **SPARSE) as pair:
        written(tmp_path / "capture")
        assert run(["geometry", str(tmp_path / "capture"), "--json"]) == 0, capsys.readouterr().out
        serve(pair, 7, [3, 5, 9], [2, 8, 4])
    events = journals(tmp_path / "capture")
    for role, row in (("prefill", (1, 2)), ("decode", (2, 0))):
        told = [(r.req_pool_idx, r.generation) for r in of(events[role], Request) if r.phase == "start"]
        assert list(dict.fromkeys(told)) == [(-1, -1), row], "first without a row, then with it"
        index = [b for b in of(events[role], Buffer) if b.name == "index_k"]
        assert [(b.layer, b.format, b.tokens_per_row, b.pitch) for b in index] == [
            (0, "fp8", 1, 8448), (2, "fp8", 1, 8448)
        ]  # fmt: skip
        latent = [b for b in of(events[role], Buffer) if b.name == "kv"]
        assert [(b.pitch, b.item_length) for b in latent] == [(1152, 64 * 1152)] * 3
    stores = of(events["prefill"], Store)
    assert {(s.room, s.buffer) for s in stores} == {(7, 0), (7, 1)}
    rows = [row for s in stores if s.buffer == 0 for row in s.logical_rows.tolist()]
    slots = [slot for s in stores if s.buffer == 0 for slot in s.slots.tolist()]
    assert rows == list(range(150))
    assert slots == [[3, 5, 9][row // 64] * 64 + row % 64 for row in rows]
    seen = [s for s in of(events["prefill"], Snapshot) if s.stage == "ST" and s.buffer == 0]
    assert [(s.rows, s.logical.tolist(), s.pages.tolist()) for s in seen] == [
        (100, [0, 1], [3, 5]), (150, [1, 2], [5, 9])
    ]  # fmt: skip
    (receive,) = of(events["decode"], Receive)
    assert receive.item_lengths.tolist() == [8448, 8448]
    carrying = [s for s in of(events["prefill"], Send) if s.room == 7 and 8448 in s.item_lengths]
    assert [(s.pages.tolist(), s.destination_pages.tolist(), s.logical) for s in carrying] == [
        ([3, 5, 9], [2, 8, 4], 0)
    ]  # fmt: skip
    reads = of(events["decode"], Read)
    assert {(r.rows, tuple(r.table.tolist()), r.kernel) for r in reads} == {
        (151, (2, 8, 4), "deep_gemm.fp8_paged_mqa_logits"), (152, (2, 8, 4), "deep_gemm.fp8_paged_mqa_logits")
    }  # fmt: skip
    gathered = of(events["prefill"], Read)
    assert {(r.rows, tuple(r.table.tolist()), r.kernel, len(r.logits)) for r in gathered} == {
        (100, (3, 5), "deep_gemm.fp8_mqa_logits", 100), (150, (3, 5, 9), "deep_gemm.fp8_mqa_logits", 150)
    }  # fmt: skip
    with open_trace(tmp_path / "capture") as trace:
        verdict = judge(trace, JudgeOptions(sample=0))
    assert verdict.verdict == "clean", (verdict.findings, verdict.not_judged)
    assert verdict.scope["reads"]["rows"] == verdict.scope["reads"]["rows_reproduced"]
    assert verdict.scope["reads"]["rows"] > 2 * (2 * 150 + 100 + 150)


def test_a_source_that_changed_before_the_post_is_named(host: sglang_pair.Host, tmp_path: Path) -> None:
    with host.pair(tmp_path, OPTIONS, **SPARSE) as pair:
        serve(pair, 7, [3, 5, 9], [2, 8, 4], "source")
    with open_trace(tmp_path / "capture") as trace:
        verdict = judge(trace, JudgeOptions(sample=0))
    assert verdict.verdict == "divergent"
    assert {(f.stage, f.layer, tuple(p.logical for p in f.pages)) for f in verdict.findings} == {
        ("source", 0, (1,)), ("source", 2, (1,))
    }  # fmt: skip


def test_states_by_prepared_lists(host: sglang_pair.Host, tmp_path: Path) -> None:
    """On a GPU the manager prepares the lists of all pages once, and each transfer chooses blocks of them."""
    source, destination = [3, 5, 9], [2, 8, 4]
    with host.pair(tmp_path, OPTIONS, **PREPARED) as pair:
        sent = serve(pair, 7, source, destination)
        assert pair.prefill.plans() == [[0]]
        assert pair.prefill.hooks()["fired"]["sglang.NixlKVManager.maybe_send_extra"] == 1
    events = journals(tmp_path / "capture")
    at = {
        role: {b.layer: b.address for b in of(events[role], Buffer) if b.name == "index_k"} for role in events
    }
    (send,) = [s for s in of(events["prefill"], Send) if s.room == 7 and 8448 in s.item_lengths]
    assert (send.chunk, send.last, send.logical) == (1, True, 0)
    assert (send.pages.tolist(), send.destination_pages.tolist()) == (source, destination)
    for blocks, role, pages in ((send.source, "prefill", source), (send.destination, "decode", destination)):
        assert blocks.tolist() == [
            [at[role][layer] + page * 8448, 8448] for layer in (0, 2) for page in pages
        ]
    posted = [s for s in of(events["prefill"], TransferState) if s.transfer == send.transfer]
    assert [(s.state, s.room) for s in posted] == [("posted", 7), ("done", 7)]
    seen = {(look.stage, look.moment) for look in looks(tmp_path)}
    assert {("SE", "before"), ("SE", "after"), ("RC", "")} <= seen
    for look in looks(tmp_path):
        if (look.stage, look.moment) != ("RC", "before") and look.stage in ("SE", "RC", "LT"):
            whole = sent[(0, 2).index(look.layer)]
            assert look.data == whole[look.logical * 8448 : (look.logical + 1) * 8448], look
    with open_trace(tmp_path / "capture") as trace:
        verdict = judge(trace, JudgeOptions(sample=0))
    assert verdict.verdict == "clean", (verdict.findings, verdict.not_judged)


@pytest.mark.parametrize(("way", "code"), [("layers", "F05"), ("pages", "F04")])
def test_blocks_of_a_prepared_list_that_are_chosen_wrongly(
    host: sglang_pair.Host, tmp_path: Path, way: str, code: str
) -> None:
    """Both sides report success."""
    with host.pair(tmp_path, OPTIONS, **PREPARED) as pair:
        serve(pair, 7, [3, 5, 9], [2, 8, 4], way)
    with open_trace(tmp_path / "capture") as trace:
        verdict = judge(trace, JudgeOptions(sample=0))
    assert verdict.verdict == "divergent"
    assert {(f.code, f.layer) for f in verdict.findings} == {(code, 0), (code, 2)}


@pytest.mark.parametrize("way", ["elsewhere", "moved"])
def test_another_way_into_the_cache_closes_the_rung(host: sglang_pair.Host, tmp_path: Path, way: str) -> None:
    with host.pair(tmp_path, OPTIONS, **SPARSE) as pair:
        pair.prefill.serve()
        pair.decode.receive(room=7, pages=[1])
        assert pair.prefill.open(room=7, pages=1) == 2
        pair.prefill.start(room=7, row=1, pages=[3])
        pair.prefill.step(room=7, tokens=40, way="elsewhere" if way == "elsewhere" else "setter")
        if way == "moved":
            pair.prefill.move()
        pair.prefill.settle()
    hooks = [h for h in of(journals(tmp_path / "capture")["prefill"], Hook) if h.name == "sglang.store"]
    assert not hooks[-1].complete
    assert ("not hooked" if way == "elsewhere" else "move_kv_cache") in hooks[-1].note
