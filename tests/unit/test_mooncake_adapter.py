"""The Mooncake adapter with a stand-in for the library's call."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from capture_hooks.adapters.mooncake import MooncakeAdapter
from capture_hooks.adapters.sglang import wire as sglang_wire
from capture_hooks.events import Loss, Process, Registration, Send, TransferState
from capture_hooks.journal import JournalReader
from capture_hooks.options import Options
from capture_hooks.recorder import Recorder


def events_of(recorder: Recorder) -> list[Any]:
    recorder.close()
    return [event for _, event in JournalReader(recorder.path)]


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(Options(capture=tmp_path, seal=False), Process("prefill"))


def test_a_transfer_with_what_the_engine_told(recorder: Recorder) -> None:
    wire = MooncakeAdapter(recorder)
    order: list[str] = []
    wire.before_post.append(lambda post: order.append(f"before {post.transfer} {post.state}"))
    wire.after_state.append(lambda post: order.append(f"after {post.transfer} {post.state}"))
    wire.registered("a", [(100, 900)])
    with recorder.about(
        7, 1, 2, True, written=lambda: order.append("asked") or 0, awaited=1, logical=4, pages=[3]
    ):
        code = wire.transfer(lambda: order.append("moved") or 0, "a", "b", [(100, 5000, 64), (200, 6000, 32)])
    assert code == 0
    assert order == ["asked", "before 0 posted", "moved", "after 0 done"]
    events = events_of(recorder)
    (send,) = [e for e in events if isinstance(e, Send)]
    assert (send.room, send.attempt, send.chunk, send.last, send.written, send.awaited, send.logical) == (
        7, 1, 2, True, 0, 1, 4
    )  # fmt: skip
    assert send.source.tolist() == [[100, 64], [200, 32]]
    assert send.destination.tolist() == [[5000, 64], [6000, 32]]
    assert [(s.state, s.room) for s in events if isinstance(s, TransferState)] == [("posted", 7), ("done", 7)]
    assert [(r.address, r.length) for r in events if isinstance(r, Registration)] == [(100, 900)]


@pytest.mark.parametrize("code", [1, -1])
def test_a_transfer_that_failed(recorder: Recorder, code: int) -> None:
    assert MooncakeAdapter(recorder).transfer(lambda: code, "a", "b", [(1, 2, 3)]) == code
    states = [(s.state, s.detail) for s in events_of(recorder) if isinstance(s, TransferState)]
    assert states == [("posted", ""), ("error", f"code {code}")]


def test_the_librarys_own_error_and_a_look_that_fails(recorder: Recorder) -> None:
    wire = MooncakeAdapter(recorder)
    wire.before_post.append(lambda _: 1 / 0)  # type: ignore[arg-type]

    def call() -> int:
        raise RuntimeError("gone")

    with pytest.raises(RuntimeError, match="gone"):
        wire.transfer(call, "a", "b", [(1, 2, 3)])
    assert wire.transfer(lambda: 0, "a", "b", [(1, 2, 3)]) == 0
    events = events_of(recorder)
    assert [send.transfer for send in events if isinstance(send, Send)] == [0, 1], (
        "the posts are told all the same"
    )
    assert [(s.state, s.detail) for s in events if isinstance(s, TransferState)] == [
        ("posted", ""), ("error", "RuntimeError"), ("posted", ""), ("done", "")
    ]  # fmt: skip
    assert sum(loss.count for loss in events if isinstance(loss, Loss) and loss.stage == "hook") == 2


def test_an_engine_that_does_not_tell_its_name_is_counted_and_its_transfer_goes_on(
    recorder: Recorder,
) -> None:
    """The hook on SGLang's own call, around a manager whose engine fails when it is asked."""
    bodies: dict[str, Any] = {}
    patches = SimpleNamespace(wrap=lambda name, **given: bodies.update({name: given}))
    session: Any = SimpleNamespace(
        recorder=recorder, role="prefill", transport="mooncake", patches=patches, wire=None
    )
    sglang_wire.install(session)
    moves = bodies["MooncakeKVManager._transfer_data"]["around"]
    blocks = [(100, 5000, 64)]

    def original(_: Any, peer: str, given: Any) -> str:
        return f"{peer} {given}"

    mute = SimpleNamespace(engine=SimpleNamespace(get_session_id=lambda: 1 / 0))
    assert moves(original, mute, "peer", blocks) == f"peer {blocks}"
    telling = SimpleNamespace(engine=SimpleNamespace(get_session_id=lambda: "host:1"))
    assert moves(lambda *_: 0, telling, "peer", blocks) == 0
    assert moves(lambda *_: 0, telling, "peer", []) == 0
    events = events_of(recorder)
    (send,) = [event for event in events if isinstance(event, Send)]
    assert "host" not in send.agent
    assert sum(loss.count for loss in events if isinstance(loss, Loss) and loss.stage == "hook") == 1
