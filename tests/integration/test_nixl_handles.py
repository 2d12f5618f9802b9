"""The NIXL adapter over weeks: what it knows of handles, lists and messages stays bounded, what was forgotten is told,
and only what NIXL says to be over is over.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capture_hooks.adapters import nixl
from capture_hooks.adapters.nixl import adapter as module
from capture_hooks.adapters.nixl import notifications
from capture_hooks.adapters.nixl.kept import Kept
from capture_hooks.adapters.nixl.lists import Prepared, chosen, prepared
from capture_hooks.events import Event, Loss, Process, Send, TransferState
from capture_hooks.journal import JournalReader
from capture_hooks.options import Options
from capture_hooks.recorder import Recorder
from tests.integration.nixl_fakes import Agent, DescList, Handle, Recording, hooks, kinds, real_agents


class Ledger:
    """In the place of a recorder: keeps no record, only what is told of hooks."""

    closed = False

    def __init__(self) -> None:
        self.told: Counter[str] = Counter()
        self.missing: dict[str, str] = {}

    def guard(self, name: str) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def emit(self, event: Event) -> int:
        self.told[getattr(event, "state", event.TABLE)] += 1
        return 0

    def incomplete(self, name: str, why: str) -> None:
        self.missing[name] = why

    def hook(self, *_: Any) -> None: ...

    def fired(self, name: str) -> None: ...

    def detached(self, name: str) -> bool:
        return False

    def current(self) -> None: ...


@pytest.fixture
def long_run(agent_class: type[Agent]) -> Iterator[tuple[Ledger, nixl.NixlAdapter, Agent]]:
    ledger = Ledger()
    adapter = nixl.NixlAdapter(ledger, agent_class).install()  # type: ignore[arg-type]
    yield ledger, adapter, agent_class()
    adapter.uninstall()


def plan(agent: Agent, address: int = 1) -> Handle:
    handle = agent.initialize_xfer("WRITE", DescList([(address, 2, 0)]), DescList([(3, 2, 0)]), "right")
    assert handle is not None
    return handle


def states(events: list[Any]) -> list[tuple[str, str]]:
    return [(event.state, event.detail) for event in kinds(events, TransferState)]


# -- bounds ------------------------------------------------------------------------------------------------------------


def test_two_hundred_thousand_handles_that_nobody_releases(
    long_run: tuple[Ledger, nixl.NixlAdapter, Agent],
) -> None:
    """Half of them are over, then half are still on their way."""
    ledger, adapter, agent = long_run
    first = plan(agent)
    for number in range(200_000):
        handle = first if number == 0 else plan(agent)
        agent.answers = ["DONE" if number < 100_000 else "PROC"]
        agent.transfer(handle)
        if number == 100_000:
            early = handle
    last = handle
    assert len(adapter._over) <= module.MOST
    assert len(adapter._open) == module.MOST
    assert ledger.told == Counter(send=200_000, posted=200_000, done=100_000)
    assert not ledger.missing, "what is forgotten and does not come back is no gap"

    agent.answers = ["DONE", "PROC", "DONE"]
    agent.check_xfer_state(early)
    assert ledger.told["done"] == 100_000, "whose end this is cannot be said any more"
    assert "had been forgotten" in ledger.missing.pop("nixl.check_xfer_state")
    agent.transfer(first)
    assert "so long ago that it is forgotten" in ledger.missing.pop("nixl.transfer")
    agent.check_xfer_state(last)
    assert ledger.told["done"] == 100_001
    assert not ledger.missing


def test_a_transfer_that_is_over_and_forgotten_may_be_asked_for_again(
    long_run: tuple[Ledger, nixl.NixlAdapter, Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines poll all handles of a batch until the last is done: nothing is missing for it."""
    ledger, adapter, agent = long_run
    adapter._over = Kept(2)
    posted = [plan(agent) for _ in range(5)]
    for handle in posted:
        agent.answers = ["PROC", "DONE"]
        agent.transfer(handle)
        agent.check_xfer_state(handle)
    agent.answers = ["DONE"] * 5
    for handle in posted:
        agent.check_xfer_state(handle)
    assert ledger.told == Counter(send=5, posted=5, done=5)
    assert not ledger.missing


def test_a_transfer_on_its_way_outlives_all_that_are_over(
    long_run: tuple[Ledger, nixl.NixlAdapter, Agent],
) -> None:
    ledger, adapter, agent = long_run
    adapter._over = Kept(2)
    adapter._open = Kept(3)
    stuck = plan(agent)
    agent.answers = ["PROC"]
    agent.transfer(stuck)
    for _ in range(50):
        handle = plan(agent)
        agent.answers = ["DONE"]
        agent.transfer(handle)
    agent.answers = ["DONE"]
    agent.check_xfer_state(stuck)
    assert ledger.told["done"] == 51
    assert not ledger.missing


def test_descriptors_are_bounded_by_their_bytes(agent_class: type[Agent], tmp_path: Path) -> None:
    kept: Kept[np.ndarray[Any, Any]] = Kept(1000, 10_000, lambda array: array.nbytes)
    for number in range(100):
        kept.put(number, np.zeros(500, np.uint8))
        assert sum(kept.get(key) is not None for key in range(number + 1)) == min(number + 1, 20)
    assert kept.forgotten == 80
    kept.put(500, np.zeros(50_000, np.uint8))
    assert len(kept) == 1, "the newest one stays, whatever its size"
    kept.pop(500)
    for number in range(20):
        kept.put(number, np.zeros(500, np.uint8))
    assert len(kept) == 20, "what was taken out does not count"


def test_released_handles_and_lists_are_forgotten(long_run: tuple[Ledger, nixl.NixlAdapter, Agent]) -> None:
    ledger, adapter, agent = long_run
    for _ in range(100):
        local, remote = (agent.prep_xfer_dlist(side, [(1, 2, 0)]) for side in ("", "right"))
        handle = agent.make_prepped_xfer("WRITE", local, [0], remote, [0])
        assert handle is not None
        agent.answers = ["PROC", "DONE", "PROC"]
        agent.transfer(handle)
        agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        agent.release_dlist_handle(local)
        agent.release_dlist_handle(remote)
    assert [len(table) for table in (adapter._open, adapter._over, adapter._lists)] == [0, 0, 0]
    assert ledger.told == Counter(send=100, posted=100, done=100, released=100)
    assert not ledger.missing
    agent.make_prepped_xfer("WRITE", local, [0], remote, [0])
    assert "a list was prepared before capture began" in ledger.missing["nixl.transfer"]


def test_lists_that_nobody_releases_are_bounded_and_one_that_comes_back_is_told(
    long_run: tuple[Ledger, nixl.NixlAdapter, Agent],
) -> None:
    ledger, adapter, agent = long_run
    adapter._lists = Kept(100)
    local = agent.prep_xfer_dlist("", [(1, 2, 0)])
    first = agent.prep_xfer_dlist("right", [(1, 2, 0)])
    for _ in range(1000):
        remote = agent.prep_xfer_dlist("right", [(1, 2, 0)])
        agent.make_prepped_xfer("WRITE", local, [0], remote, [0])
    assert len(adapter._lists) == 100
    assert not ledger.missing, "the one that every transfer uses is not the oldest"
    agent.make_prepped_xfer("WRITE", local, [0], first, [0])
    assert "so long ago that it is forgotten" in ledger.missing["nixl.transfer"]


def test_messages_are_counted_within_a_bound_and_it_is_told(
    long_run: tuple[Ledger, nixl.NixlAdapter, Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, adapter, _ = long_run
    notes = adapter._notes
    keys: list[str] = []
    monkeypatch.setattr(ledger, "emit", lambda event: keys.append(event.key))
    for number in range(notifications.MOST):
        notes.tail("left", "right", b"%d" % number)
    assert not ledger.missing
    for number in range(5):
        notes.tail("left", "right", b"more %d" % number)
    assert len(notes._sent) == notifications.MOST
    assert len(set(keys)) == len(keys)
    assert set(ledger.missing) == {"nixl.send_notif", "nixl.get_new_notifs"}
    notes.tail("left", "right", b"more 1")
    assert keys[-1] == keys[-5].partition(".")[0] + ".2", "what is known is counted on"


# -- prepared lists ----------------------------------------------------------------------------------------------------


def test_a_strided_list_is_every_block_of_it_and_takes_no_room_for_them() -> None:
    runs = np.array([[1000, 16, 0, 64, 3], [9, 9, 0, 9, 0], [5000, 8, 0, 8, 1 << 40]], np.uint64)
    found = prepared("right", runs)
    assert chosen(found, [0, 1, 2, 3, 4, 3 + (1 << 30)]).tolist() == [
        [1000, 16], [1064, 16], [1128, 16], [5000, 8], [5008, 8], [5000 + (8 << 30), 8],
    ]  # fmt: skip
    assert found.nbytes < 1000


def test_a_list_of_pages_side_by_side_is_kept_as_runs_of_them() -> None:
    pages = [(base + 8448 * i, 8448, 0) for base in (1 << 20, 1 << 30) for i in range(1000)]
    odd = [(7, 100, 0), (107, 100, 0), (107, 100, 0), (300, 50, 0), (350, 100, 0)]
    found = prepared("", np.array(pages + odd, np.uint64))
    assert len(found.runs) == 2 + 4
    every = chosen(found, np.arange(2005, dtype=np.int32))
    assert every.tolist() == [list(row[:2]) for row in pages + odd]
    assert chosen(prepared("", []), []).shape == (0, 2)
    for outside in ([2005], [-1]):
        with pytest.raises(IndexError, match="a prepared list of 2005 has no block"):
            chosen(found, outside)


def test_lists_of_any_shape_give_what_they_were_given() -> None:
    draw = np.random.default_rng(5)
    for _ in range(200):
        count = int(draw.integers(0, 12))
        rows = np.stack([draw.integers(0, 5, count) * 2, draw.integers(1, 3, count), np.zeros(count)], 1)
        found: Prepared = prepared("", rows.astype(np.uint64))
        wanted = draw.integers(0, count, 6) if count else np.zeros(0, np.int64)
        assert chosen(found, wanted).tolist() == rows[wanted][:, :2].tolist()


# -- ends --------------------------------------------------------------------------------------------------------------


def test_an_error_that_a_post_returns_is_its_end(recording: Recording, agent_class: type[Agent]) -> None:
    agent = agent_class()
    handle = plan(agent)
    agent.answers = ["ERR"]
    assert agent.transfer(handle) == "ERR"
    assert states(recording.events()) == [("error", "")]


@pytest.mark.parametrize(
    "raised", ["nixlBackendError", "nixlRemoteDisconnectError", "nixlInvalidParamError", "RAISE"]
)
def test_a_post_that_raises_may_have_begun(
    recording: Recording, agent_class: type[Agent], raised: str
) -> None:
    agent = agent_class()
    handle = plan(agent)
    agent.answers = [raised]
    with pytest.raises(Exception, match="the backend is gone"):
        agent.transfer(handle)
    name = "RuntimeError" if raised == "RAISE" else raised
    assert states(recording.events()) == [
        ("posted", ""), ("posted", f"{name} in transfer: it may still be on its way")
    ]  # fmt: skip
    assert recording.over == []


def test_a_post_to_a_peer_that_is_not_known_never_began(
    recording: Recording, agent_class: type[Agent]
) -> None:
    agent = agent_class()
    handle = plan(agent)
    agent.answers = ["nixlNotFoundError"]
    with pytest.raises(Exception, match="the backend is gone"):
        agent.transfer(handle)
    assert states(recording.events()) == [("error", "nixlNotFoundError")]


@pytest.mark.parametrize("raised", ["nixlRepostActiveError", "nixlNotFoundError"])
def test_a_second_post_that_is_refused_leaves_the_first_on_its_way(
    recording: Recording, agent_class: type[Agent], raised: str
) -> None:
    agent = agent_class()
    handle = plan(agent)
    agent.answers = ["PROC", raised, "DONE"]
    agent.transfer(handle)
    with pytest.raises(Exception, match="the backend is gone"):
        agent.transfer(handle)
    assert agent.check_xfer_state(handle) == "DONE"
    events = recording.events()
    first, second = (send.transfer for send in kinds(events, Send))
    told = [(state.transfer, state.state) for state in kinds(events, TransferState)]
    assert told == [(first, "posted"), (second, "error"), (first, "done")]


@pytest.mark.parametrize(
    "raised",
    ["nixlNotFoundError", "nixlBackendError", "nixlRemoteDisconnectError", "nixlCancelledError", "RAISE"],
)
def test_a_state_that_cannot_be_read_is_no_end(
    recording: Recording, agent_class: type[Agent], raised: str
) -> None:
    agent = agent_class()
    handle = plan(agent)
    agent.answers = ["PROC", raised, raised, "nixlUnknownError", "PROC", "DONE"]
    agent.transfer(handle)
    for _ in range(3):
        with pytest.raises(Exception, match="the peer is gone"):
            agent.check_xfer_state(handle)
    assert recording.over == []
    agent.check_xfer_state(handle)
    assert agent.check_xfer_state(handle) == "DONE"
    name = "RuntimeError" if raised == "RAISE" else raised
    assert states(recording.events()) == [
        ("posted", ""),
        ("posted", f"{name} in check_xfer_state: it may still be on its way"),
        ("posted", "nixlUnknownError in check_xfer_state: it may still be on its way"),
        ("done", ""),
    ]
    assert recording.over == ["done"]


def test_a_release_is_no_end(recording: Recording, agent_class: type[Agent]) -> None:
    agent = agent_class()
    handle = plan(agent)
    agent.transfer(handle)
    agent.answers = ["nixlRepostActiveError"]
    with pytest.raises(Exception, match="it is still on its way"):
        agent.release_xfer_handle(handle)
    agent.release_xfer_handle(handle)
    over = plan(agent)
    agent.answers = ["DONE", "RAISE", "PROC"]
    agent.transfer(over)
    with pytest.raises(RuntimeError, match="it is still on its way"):
        agent.release_xfer_handle(over)
    agent.release_xfer_handle(over)
    events = recording.events()
    assert states(events) == [
        ("posted", ""),
        ("posted", "nixlRepostActiveError in release_xfer_handle: it may still be on its way"),
        ("released", "it was not seen to end"),
        ("posted", ""),
        ("done", ""),
        ("released", ""),
    ]
    assert not kinds(events, Loss)
    assert all(hook.complete for hook in hooks(events).values())


class Underway:
    """A write between two real agents that cannot end before the receiver makes progress."""

    def __init__(self, folder: Path) -> None:
        self.recorder = Recorder(Options(capture=folder, seal=False), Process("prefill"))
        adapter = nixl.install(self.recorder)
        assert adapter is not None
        self.adapter = adapter
        self.left, self.right = real_agents()
        self.source, self.target = np.full(8 << 20, 7, np.uint8), np.zeros(8 << 20, np.uint8)
        for agent, memory in ((self.left, self.source), (self.right, self.target)):
            agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
        peer = self.left.add_remote_agent(self.right.get_agent_metadata())
        self.peer = peer if isinstance(peer, str) else peer.decode()
        sides = [[(memory.ctypes.data, memory.nbytes, 0)] for memory in (self.source, self.target)]
        self.handle = self.left.initialize_xfer(
            "WRITE", *(self.left.get_xfer_descs(side, "DRAM") for side in sides), self.peer
        )
        assert self.left.transfer(self.handle) == "PROC"
        assert self.left.check_xfer_state(self.handle) == "PROC"
        assert not self.target.any()

    def arrive(self) -> bool:
        """Both sides make progress; whether everything is there then."""
        end = time.monotonic() + 20
        while not bool((self.target == 7).all()) and time.monotonic() < end:
            self.left.get_new_notifs()
            self.right.get_new_notifs()
        return bool((self.target == 7).all())

    def states(self) -> list[tuple[str, str]]:
        """End the recording."""
        self.adapter.uninstall()
        self.recorder.close()
        return states([event for _, event in JournalReader(self.recorder.path)])


@pytest.fixture
def underway(tmp_path: Path) -> Iterator[Underway]:
    pytest.importorskip("nixl._api")
    found = Underway(tmp_path)
    yield found
    found.adapter.uninstall()
    found.recorder.close()


def test_a_real_write_arrives_after_its_state_could_not_be_read(underway: Underway) -> None:
    underway.left.remove_remote_agent(underway.peer)
    with pytest.raises(Exception, match="NOT_FOUND"):
        underway.left.check_xfer_state(underway.handle)
    assert not underway.target.any()
    assert underway.arrive(), "this NIXL ends what it has begun when a peer is removed"
    assert underway.states() == [
        ("posted", ""), ("posted", "nixlNotFoundError in check_xfer_state: it may still be on its way")
    ]  # fmt: skip


def test_a_real_write_arrives_after_its_handle_was_released(underway: Underway) -> None:
    underway.left.release_xfer_handle(underway.handle)
    assert not underway.target.any()
    assert underway.arrive()
    assert underway.states() == [("posted", ""), ("released", "it was not seen to end")]


def test_a_real_write_goes_on_where_its_handle_is_posted_again(underway: Underway) -> None:
    with pytest.raises(Exception, match="REPOST_ACTIVE"):
        underway.left.transfer(underway.handle)
    assert underway.arrive()
    end = time.monotonic() + 20
    while underway.left.check_xfer_state(underway.handle) == "PROC" and time.monotonic() < end:
        underway.right.get_new_notifs()
    assert underway.states() == [("posted", ""), ("error", "nixlRepostActiveError"), ("done", "")]
