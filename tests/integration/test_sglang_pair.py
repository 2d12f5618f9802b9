"""SGLang's own managers, senders, receivers and pool in two processes, and the verdicts on what the plug-in recorded.

The plug-in comes in by its entry point alone. No scheduler runs here, so no kernel stores or reads: the taps of stores
and reads are off, and a verdict says of those stages that they are not in its scope.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capture_hooks.events import (
    Alloc,
    Buffer,
    Content,
    Free,
    Hook,
    Order,
    Receive,
    Registration,
    Request,
    Send,
    TransferState,
    Trigger,
)
from replay.cli import run
from replay.judge import JudgeOptions, judge
from replay.trace.reader import open_trace
from replay.verdict import Verdict
from tests.integration import sglang_pair
from tests.integration.lab_rounds import journals, of, written

VERSION = "0.5.23"
TRANSFER = {"KV_REPLAY_TAPS": "send,receive", "KV_REPLAY_LATER_MS": "30"}
LAYERS = [2, 4, 6]  # those with an indexer
OUT_OF_SCOPE = {"store", "source", "destination", "table", "read-kernel", "top-k"}

pytestmark = [
    pytest.mark.skipif(bool(sglang_pair.why_not(VERSION)), reason=sglang_pair.why_not(VERSION)),
    pytest.mark.timeout(600),
]


def verdict_of(folder: Path) -> Verdict:
    with open_trace(folder / "capture") as trace:
        return judge(trace, JudgeOptions(sample=0))


def misfits(folder: Path, capsys: pytest.CaptureFixture[str]) -> set[tuple[str, str]]:
    """What ``replay geometry`` says of the running pair: (kind, where)."""
    written(folder / "capture")
    code = run(["geometry", str(folder / "capture"), "--json"])
    listed = json.loads(capsys.readouterr().out)["hazards"]
    assert code == (1 if listed else 0)
    return {(hazard["kind"], hazard["where"]) for hazard in listed}


def found(verdict: Verdict) -> set[tuple[str, int, int, tuple[int, ...]]]:
    """(code, room, layer, logical pages) of each finding."""
    return {
        (f.code, f.request.room, f.layer, tuple(page.logical for page in f.pages)) for f in verdict.findings
    }


@dataclass(frozen=True)
class Look:
    """One page of one snapshot with its bytes."""

    role: str
    stage: str
    moment: str
    room: int
    attempt: int
    layer: int
    logical: int
    page: int
    data: bytes


def looks(folder: Path) -> list[Look]:
    """Every page that the trace has seen, with its bytes."""
    result = []
    with open_trace(folder / "capture") as trace:
        buffers = trace.table("buffer")
        layer_of = {
            (int(p), int(b)): int(layer)
            for p, b, layer in zip(buffers["process"], buffers["buffer"], buffers["layer"], strict=True)
        }
        table = trace.table("snapshot")
        columns = [table.ragged(name) for name in ("logical", "pages", "content")]
        for row in range(len(table)):
            process = int(table["process"][row])
            for logical, page, content in zip(*(c[row].tolist() for c in columns), strict=True):
                result.append(
                    Look(
                        trace.processes[process].role,
                        str(table["stage"][row]),
                        str(table["moment"][row]),
                        int(table["room"][row]),
                        int(table["attempt"][row]),
                        layer_of[process, int(table["buffer"][row])],
                        logical,
                        page,
                        bytes(trace.contents.data(np.array([content]))[0]),
                    )
                )
    return result


def expect(seen: list[Look], pages: list[int], content: list[bytes]) -> None:
    """Each look shows exactly the bytes that the pool held: ``content[layer]`` is that of all ``pages``."""
    size = len(content[0]) // len(pages)
    for look in seen:
        whole, at = content[LAYERS.index(look.layer)], pages.index(look.page) * size
        assert look.data == whole[at : at + size], look


def test_clean_transfers_whole_and_in_chunks(
    host: sglang_pair.Host, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also: whatever the plug-in says it saw is what the pool held at that time."""
    source, destination = [3, 5, 7, 9], [11, 2, 8, 4]
    with host.pair(tmp_path, TRANSFER) as pair:
        assert misfits(tmp_path, capsys) == set()
        pair.prefill.write(pages=source, seed=1)
        pair.decode.write(pages=destination, seed=2)
        old, sent = pair.decode.read(pages=destination), pair.prefill.read(pages=source)
        assert pair.transfer(7001, source, destination, 1000) == (4, 4)
        pair.looked()
        assert pair.decode.read(pages=destination) == sent
        assert pair.transfer(7002, [9, 3, 5], [20, 21, 22], 700, 1, 2) == (4, 4)
        pair.looked()
        pair.clear(7001)
        pair.clear(7002)
        infos = pair.prefill.buffers(), pair.decode.buffers()
        hooks = pair.prefill.hooks(), pair.decode.hooks()

    verdict = verdict_of(tmp_path)
    assert verdict.verdict == "clean", verdict
    assert set(verdict.scope["not_in_scope"]) == OUT_OF_SCOPE
    assert set(verdict.cleared) == {"descriptor", "wire", "completion"}
    assert verdict.scope["pages_seen"]["RC"] == 7 * len(LAYERS)

    seen = looks(tmp_path)
    first = [look for look in seen if look.room == 7001]
    for stage, moment, pages, content in (
        ("SE", "before", source, sent),
        ("SE", "after", source, sent),
        ("RC", "before", destination, old),
        ("RC", "", destination, sent),
        ("LT", "", destination, sent),
    ):
        chosen = [look for look in first if (look.stage, look.moment) == (stage, moment)]
        assert len(chosen) == len(pages) * len(LAYERS), (stage, moment)
        expect(chosen, pages, content)
    assert {(look.stage, look.moment) for look in seen} == {
        ("SE", "before"), ("SE", "after"), ("RC", "before"), ("RC", ""), ("LT", "")
    }  # fmt: skip

    events = journals(tmp_path / "capture")
    for role, infos_of, hooks_of in zip(("prefill", "decode"), infos, hooks, strict=True):
        told = {(b.address, b.item_length) for b in of(events[role], Buffer)}
        assert {tuple(pair) for pair in infos_of["kv"]} <= told
        assert {tuple(pair) for pair in infos_of["state"]} <= told
        names = {(b.name, b.layer) for b in of(events[role], Buffer) if b.format == "fp8"}
        assert names == {("index_k", layer) for layer in LAYERS}
        ranges = {(r.address, r.length) for r in of(events[role], Registration)}
        assert {tuple(pair) for pair in infos_of["registered"]} <= ranges
        assert hooks_of["version"] == VERSION
        line = (
            f"kv-replay: {role} rank 0: attached {len(hooks_of['fired'])} of {len(hooks_of['fired'])} hooks"
        )
        assert line in (tmp_path / f"{role}.log").read_text()
        stored = {hook.name: hook for hook in of_hooks(events[role])}
        assert {name for name, count in hooks_of["fired"].items() if count} == {
            name for name, hook in stored.items() if hook.fired and name.startswith("sglang.")
        }

    chunks = [s for s in of(events["prefill"], Send) if s.room == 7002]
    assert [(s.chunk, s.logical, s.pages.tolist(), s.destination_pages.tolist(), s.last) for s in chunks] == [
        (0, 0, [9], [20], False), (1, 1, [3], [21], False), (2, 2, [5], [22], True)
    ]  # fmt: skip
    assert {(s.written, s.awaited) for s in chunks} == {(-1, -1)}  # no event was given: nothing to ask
    lengths = [r.rows for r in of(events["prefill"], Request) if r.room == 7002 and r.rows >= 0]
    assert lengths == [700 // 4]


def of_hooks(events: list[Any]) -> list[Any]:
    """The last state of each hook."""
    return list({hook.name: hook for hook in of(events, Hook)}.values())


def test_aborts_acknowledgements_and_rooms_used_again(host: sglang_pair.Host, tmp_path: Path) -> None:
    with host.pair(tmp_path, TRANSFER) as pair:
        pair.prefill.write(pages=[3, 5, 7, 9, 10], seed=1)
        assert pair.transfer(1, [10], [30], 256) == (4, 4)

        pair.decode.receive(room=2, pages=[1, 2])  # given up before anything is sent
        assert pair.prefill.open(room=2, pages=2) == 2
        pair.decode.abort(room=2)
        assert pair.prefill.wait(room=2) == 0
        pair.prefill.send(room=2, pages=[3, 5], tokens=512)
        assert pair.decode.released(room=2)
        assert "Aborted" in pair.decode.failed(room=2)
        assert "abort" in pair.prefill.failed(room=2)

        pair.decode.receive(room=3, pages=[4, 5])  # given up between two chunks
        assert pair.prefill.open(room=3, pages=2) == 2
        pair.prefill.send(room=3, pages=[3], tokens=256)
        assert pair.prefill.drained(room=3)
        pair.decode.abort(room=3)
        assert pair.prefill.wait(room=3) == 0
        pair.prefill.send(room=3, pages=[5], tokens=256)
        assert pair.decode.released(room=3)
        assert "Aborted" in pair.decode.failed(room=3)
        assert "abort" in pair.prefill.failed(room=3)

        pair.prefill.write(pages=[3, 5, 7, 9], seed=2)  # both rooms come again, on pages of the other
        assert pair.transfer(3, [7, 9], [5, 1], 400) == (4, 4)
        assert pair.transfer(2, [9], [4], 256) == (4, 4)
        pair.looked()

    verdict = verdict_of(tmp_path)
    assert verdict.verdict == "clean", verdict
    assert verdict.scope["requests"] == 3
    events = journals(tmp_path / "capture")
    states = {(s.state, s.room, s.attempt) for s in of(events["decode"], TransferState)}
    assert {("aborted", 2, 0), ("acknowledged", 2, 0), ("aborted", 3, 0), ("acknowledged", 3, 0)} <= states
    assert {(s.room, s.attempt) for s in of(events["decode"], TransferState) if s.state == "arrived"} == {
        (1, 0), (3, 1), (2, 1)
    }  # fmt: skip
    # One chunk of the abandoned request went out, the other was never posted.
    assert [(s.room, s.attempt, s.chunk) for s in of(events["prefill"], Send) if s.room > 0] == [
        (1, 0, 0), (3, 0, 0), (3, 1, 0), (2, 1, 0)
    ]  # fmt: skip
    given = [(a.room, a.attempt, a.pages.tolist()) for a in of(events["decode"], Alloc)]
    assert given == [(1, 0, [30]), (2, 0, [1, 2]), (3, 0, [4, 5]), (3, 1, [5, 1]), (2, 1, [4])]
    for what, tail, head in (("announce", "decode", "prefill"), ("status", "prefill", "decode"),
                             ("abort", "decode", "prefill"), ("ack", "prefill", "decode")):  # fmt: skip
        keys = {
            end: {o.key for o in of(events[role], Order) if (o.what, o.end) == (what, end)}
            for role, end in ((tail, "tail"), (head, "head"))
        }
        assert keys["head"], what
        assert keys["head"] <= keys["tail"], what


def test_both_sides_count_the_attempts_of_a_room_alike(host: sglang_pair.Host, tmp_path: Path) -> None:
    """Either side may make an endpoint for a room of which the other never hears, and give it up again."""
    with host.pair(tmp_path, TRANSFER) as pair:
        pair.prefill.write(pages=[3, 5, 7, 9], seed=1)
        for page in (10, 11):  # decode announces and gives up, twice; prefill has a request once, which fails
            pair.decode.receive(room=4, pages=[page])
            assert pair.prefill.heard(room=4, pages=[page])
            if page == 11:
                pair.prefill.endpoint(room=4)
                assert pair.prefill.wait(room=4) == 0
                assert pair.prefill.failed(room=4)
            pair.decode.abort(room=4)
            assert pair.decode.released(room=4)
            assert "Aborted" in pair.decode.failed(room=4)
        assert pair.transfer(4, [3, 5], [12, 13], 400) == (4, 4)
        pair.clear(room=4)
        for _ in range(2):  # prefill gives up before decode has announced anything
            pair.prefill.endpoint(room=4)
            pair.prefill.abort(room=4)
            assert pair.prefill.failed(room=4)
        pair.decode.endpoint(room=4)  # and so does decode
        pair.decode.abort(room=4)
        assert pair.decode.failed(room=4)
        pair.decode.receive(room=4, pages=[14])
        assert pair.prefill.open(room=4, pages=1) == 2
        pair.prefill.send(room=4, pages=[7], tokens=256)
        assert pair.prefill.wait(room=4) == pair.decode.wait(room=4) == 4
        pair.prefill.clear(room=4)  # decode still has it when the next one is announced
        assert pair.transfer(4, [9], [15], 256) == (4, 4)
        pair.looked()
    events = journals(tmp_path / "capture")
    assert [(s.room, s.attempt, s.pages.tolist(), s.destination_pages.tolist()) for s in of(events["prefill"], Send)
            if s.room > 0] == [(4, 2, [3, 5], [12, 13]), (4, 3, [7], [14]), (4, 4, [9], [15])]  # fmt: skip
    assert [(r.attempt, r.pages.tolist()) for r in of(events["decode"], Receive)] == [
        (0, [10]), (1, [11]), (2, [12, 13]), (3, [14]), (4, [15])
    ]  # fmt: skip
    given_up = {
        r.attempt for role in events for r in of(events[role], Request) if r.phase in ("abort", "fail")
    }
    assert given_up == {0, 1}, "attempts that nobody announced have no number of their own"
    verdict = verdict_of(tmp_path)
    assert verdict.verdict == "clean", verdict
    assert verdict.scope["requests"] == 3


def test_four_source_pages_against_three_destination_pages(host: sglang_pair.Host, tmp_path: Path) -> None:
    """SGLang drops the fourth with a line in its log, and both sides report success."""
    with host.pair(tmp_path, TRANSFER) as pair:
        pair.prefill.write(pages=[3, 5, 7, 9, 10], seed=1)
        assert pair.transfer(7001, [3, 5, 7, 9], [11, 2, 8], 1000) == (4, 4)
        assert pair.transfer(7002, [10, 3], [12, 13], 500) == (4, 4)
        pair.looked()
    verdict = verdict_of(tmp_path)
    assert verdict.verdict == "divergent"
    assert found(verdict) == {("F02", 7001, layer, (3,)) for layer in LAYERS}
    assert {f.confidence for f in verdict.findings} == {"certain"}
    page = verdict.findings[0].pages[0]
    assert page.value_rows == ((0, 1000 // 4 - 3 * 64 - 1),)
    (send,) = [s for s in of(journals(tmp_path / "capture")["prefill"], Send) if s.room == 7001]
    assert (len(send.pages), len(send.destination_pages)) == (4, 3)
    assert len(send.source) == len(send.destination) == 3 * len(send.item_lengths)


def test_a_source_written_after_an_early_send(host: sglang_pair.Host, tmp_path: Path) -> None:
    """The sender was given an event for it; nobody waited, for the NIXL manager drops it."""
    with host.pair(tmp_path, TRANSFER) as pair:
        pair.prefill.write(pages=[3, 5, 7], seed=1)
        old = pair.prefill.read(pages=[3, 5])
        pair.decode.receive(room=9, pages=[1, 2, 3])
        assert pair.prefill.open(room=9, pages=3) == 2
        pair.prefill.send(room=9, pages=[3, 5], tokens=512, event=True)
        assert pair.prefill.drained(room=9)
        pair.prefill.write(pages=[3, 5], seed=2)
        new = pair.prefill.read(pages=[3, 5])
        pair.prefill.happen(room=9)
        pair.looked()
        pair.prefill.send(room=9, pages=[7], tokens=100)
        assert pair.prefill.wait(room=9) == pair.decode.wait(room=9) == 4
        pair.looked()
        assert pair.decode.read(pages=[1, 2]) == old
        assert pair.prefill.own_methods(room=9)
    verdict = verdict_of(tmp_path)
    assert verdict.verdict == "divergent"
    assert found(verdict) == {("F10", 9, layer, (0, 1)) for layer in LAYERS}
    lines = verdict.findings[0].evidence
    assert "asked at the post, the page's last store had not finished" in lines
    assert "nobody waited for the store before the post" in lines
    sends = [s for s in of(journals(tmp_path / "capture")["prefill"], Send) if s.room == 9]
    assert [(s.written, s.awaited) for s in sends] == [(0, 0), (-1, -1)]
    written = [look for look in looks(tmp_path) if look.stage == "ST"]
    assert len(written) == 2 * len(LAYERS)
    expect(written, [3, 5], new)


def test_an_event_that_has_happened_or_was_waited_for(host: sglang_pair.Host, tmp_path: Path) -> None:
    with host.pair(tmp_path, TRANSFER) as pair:
        pair.prefill.write(pages=[3, 5], seed=1)
        pair.decode.receive(room=9, pages=[1, 2])
        assert pair.prefill.open(room=9, pages=2) == 2
        pair.prefill.send(room=9, pages=[3], tokens=256, event=True, happened=True)
        assert pair.prefill.drained(room=9)
        pair.prefill.send(room=9, pages=[5], tokens=256)
        assert pair.prefill.wait(room=9) == pair.decode.wait(room=9) == 4
        pair.looked()
    assert verdict_of(tmp_path).verdict == "clean"
    sends = [s for s in of(journals(tmp_path / "capture")["prefill"], Send) if s.room == 9]
    assert [(s.written, s.awaited) for s in sends] == [(1, 0), (-1, -1)]


def test_a_buffer_left_out_of_the_transfer(
    host: sglang_pair.Host, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with host.pair(tmp_path, TRANSFER, leave_out=2) as pair:
        assert misfits(tmp_path, capsys) == {
            ("not-registered", f"{side} 0: index_k layer 6") for side in ("prefill", "decode")
        }
        pair.prefill.write(pages=[3, 5, 7, 9], seed=1)
        assert pair.transfer(7001, [3, 5, 7, 9], [11, 2, 8, 4], 1000) == (4, 4)
        pair.looked()
    verdict = verdict_of(tmp_path)
    assert verdict.verdict == "divergent"
    assert found(verdict) == {("F01", 7001, 6, (0, 1, 2, 3))}
    assert verdict.findings[0].confidence == "certain"
    (receive,) = of(journals(tmp_path / "capture")["decode"], Receive)
    assert receive.item_lengths.tolist() == [8448, 8448, 0]


def test_fp4_at_prefill_against_fp8_at_decode(
    host: sglang_pair.Host, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The handshake lets it pass, and both sides report success; the inventories show it before any traffic."""
    with host.pair(tmp_path, TRANSFER, prefill_fp4=True) as pair:
        assert misfits(tmp_path, capsys) == {
            (kind, f"index_k layer {layer}") for kind in ("format", "item-length") for layer in LAYERS
        }
        pair.prefill.write(pages=[3, 5, 7, 9], seed=1)
        assert pair.transfer(7001, [3, 5, 7, 9], [11, 2, 8, 4], 1000) == (4, 4)
        pair.looked()
    verdict = verdict_of(tmp_path)
    assert verdict.verdict == "divergent"
    assert found(verdict) == {("F03", 7001, layer, (0, 1, 2, 3)) for layer in LAYERS}
    assert "fp4 (4352 bytes a page) and fp8 (8448)" in " ".join(verdict.findings[0].evidence)


def test_what_was_asked_for_and_never_seen_is_told(host: sglang_pair.Host, tmp_path: Path) -> None:
    """With every tap on, a clean transfer without any store or read is not called clean."""
    with host.pair(tmp_path, {"KV_REPLAY_LATER_MS": "30"}) as pair:
        pair.prefill.write(pages=[3], seed=1)
        assert pair.transfer(7001, [3], [11], 256) == (4, 4)
        pair.looked()
    verdict = verdict_of(tmp_path)
    assert verdict.verdict == "inconclusive"
    assert not verdict.findings
    told = {item.what: item.why for item in verdict.not_judged}
    assert "never fired" in told["prefill rank 0: store"]
    assert "never fired" in told["decode rank 0: read"]


def test_alarms_are_triggers_and_fake_requests_are_marked(host: sglang_pair.Host, tmp_path: Path) -> None:
    with host.pair(tmp_path, TRANSFER | {"KV_REPLAY_MODE": "pages"}) as pair:
        pair.prefill.write(pages=[3], seed=1)
        assert pair.transfer(7001, [3], [11], 256) == (4, 4)
        for end in (pair.prefill, pair.decode):
            end.fake(room=55)
        pair.looked()
        assert pair.prefill.canary(violations=0) == ""
        assert pair.prefill.canary(violations=2) == "RuntimeError", "what SGLang raises is raised"
        pair.decode.checksum_differs(room=7001)
    events = journals(tmp_path / "capture")
    assert [t.reason for t in of(events["prefill"], Trigger)] == ["SGLang's kv-canary found a violation"]
    assert [(t.reason, t.room, t.attempt) for t in of(events["decode"], Trigger)] == [
        ("SGLang's KV checksum differs", 7001, 0)
    ]
    for role in ("prefill", "decode"):
        assert ("fake", 55) in {(r.mark, r.room) for r in of(events[role], Request)}
        assert of(events[role], Content), "the bytes of the last seconds were kept"
    verdict = verdict_of(tmp_path)
    assert verdict.verdict == "clean", verdict
    assert verdict.scope["requests"] == 1


def test_admission_and_releases_that_wait(host: sglang_pair.Host, tmp_path: Path) -> None:
    """The queue's own methods, on stand-ins for the queue and the pools below it."""
    with host.pair(tmp_path, TRANSFER) as pair:
        pair.prefill.write(pages=[3, 5], seed=1)
        sent = pair.prefill.read(pages=[3])
        assert pair.transfer(1, [3], [11], 256) == (4, 4)
        pair.looked()
        pair.decode.admit(room=1)
        pair.decode.receive(room=2, pages=[20, 21])  # prefill acknowledges
        assert pair.prefill.open(room=2, pages=2) == 2
        pair.decode.abort(room=2)
        assert pair.decode.released(room=2)
        pair.decode.give_up(room=2)
        pair.decode.receive(room=3, pages=[22])  # nobody acknowledges before the time is over
        pair.prefill.silent()
        pair.decode.abort(room=3)
        pair.decode.give_up(room=3)
    events = journals(tmp_path / "capture")["decode"]
    assert [(f.room, f.attempt, f.pages.tolist(), f.reason) for f in of(events, Free)] == [
        (2, 0, [20, 21], "abort, acknowledged"),
        (3, 0, [22], "abort, not acknowledged in time"),
    ]
    later = [look for look in looks(tmp_path) if (look.stage, look.room) == ("LT", 1)]
    assert len(later) == 2 * len(LAYERS), "once a little later, once at admission"
    expect(later, [11], sent)
    assert verdict_of(tmp_path).verdict == "clean"
