"""The NIXL adapter: what it records of a stand-in agent and of two real ones, and that off is off."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capture_hooks.adapters import nixl
from capture_hooks.adapters.posts import Post
from capture_hooks.events import Loss, Order, Process, Registration, Send, TransferState
from capture_hooks.journal import JournalReader
from capture_hooks.layouts import layout
from capture_hooks.options import Options
from capture_hooks.recorder import Recorder
from capture_hooks.regions import Regions
from tests.integration.nixl_fakes import Agent, DescList, Handle, Recording, hooks, kinds, real_agents


def test_uninstalled_methods_are_the_original_functions(tmp_path: Path, agent_class: type[Agent]) -> None:
    before = dict(vars(agent_class))
    found = Recording(tmp_path, agent_class)
    wrapped = {name for name in nixl.COVERS if vars(agent_class)[name] is not before[name]}
    found.events()
    assert wrapped == set(nixl.COVERS)
    assert all(vars(agent_class)[name] is before[name] for name in nixl.COVERS)


def test_uninstall_leaves_a_wrapper_of_somebody_else_in_place(
    tmp_path: Path, agent_class: type[Agent]
) -> None:
    found = Recording(tmp_path, agent_class)
    ours = vars(agent_class)["transfer"]

    def theirs(self: Agent, *args: Any, **keywords: Any) -> str:
        return str(ours(self, *args, **keywords))

    agent_class.transfer = theirs  # type: ignore[method-assign, assignment]
    found.events()
    assert vars(agent_class)["transfer"] is theirs
    assert agent_class().transfer(Handle(1)) == "PROC", "ours passes through"


def test_a_post_is_told_with_both_descriptor_lists_and_the_request(
    recording: Recording, agent_class: type[Agent]
) -> None:
    agent = agent_class()
    source = [(0x1000 + i * 8448, 8448, 0) for i in range(12)]
    target = [(0x9000 + i * 8448, 8448, 0) for i in reversed(range(12))]
    handle = agent.initialize_xfer("WRITE", DescList(source), DescList(target), "right")
    asked: list[bool] = []

    def written() -> int:
        asked.append(not agent.calls)  # before the library got it
        return 0

    with recording.recorder.about(
        7719, 1, 2, True, written=written, awaited=0, logical=4, pages=[3, 1], destination_pages=[8, 9],
        item_lengths=[8448],
    ):  # fmt: skip
        assert agent.transfer(handle) == "PROC"
    agent.answers = ["PROC", "DONE", "DONE"]
    assert [agent.check_xfer_state(handle) for _ in range(3)] == ["PROC", "DONE", "DONE"]
    agent.release_xfer_handle(handle)
    events = recording.events()
    (send,) = kinds(events, Send)
    assert (send.room, send.attempt, send.chunk, send.last) == (7719, 1, 2, True)
    assert (send.agent, send.peer, send.operation, send.written, send.awaited) == (
        "left",
        "right",
        "WRITE",
        0,
        0,
    )
    assert (send.logical, send.pages.tolist(), send.destination_pages.tolist()) == (4, [3, 1], [8, 9])
    assert send.source.tolist() == [list(row[:2]) for row in source]
    assert send.destination.tolist() == [list(row[:2]) for row in target]
    states = kinds(events, TransferState)
    assert [state.state for state in states] == ["posted", "done", "released"], (
        "a poll that changes nothing is silent"
    )
    assert {(state.transfer, state.room, state.attempt) for state in states} == {(send.transfer, 7719, 1)}
    assert asked == [True]


def test_prepared_lists_give_the_descriptors_that_were_chosen(
    recording: Recording, agent_class: type[Agent]
) -> None:
    agent = agent_class()
    local = agent.prep_xfer_dlist(
        "NIXL_INIT_AGENT", np.array([[100 * i, 10, 0] for i in range(5)], np.uint64)
    )
    remote = agent.prep_xfer_dlist(agent_name="right", xfer_list=[(7000 + i, 10, 0) for i in range(5)])
    handle = agent.make_prepped_xfer("WRITE", local, [4, 0], remote, np.array([1, 3], np.int32))
    agent.answers = ["DONE"]
    agent.transfer(handle=handle)
    events = recording.events()
    (send,) = kinds(events, Send)
    assert send.source.tolist() == [[400, 10], [0, 10]]
    assert send.destination.tolist() == [[7001, 10], [7003, 10]]
    assert send.peer == "right"
    assert [state.state for state in kinds(events, TransferState)] == ["posted", "done"]
    assert hooks(events)["nixl.transfer"].complete


def test_descriptors_are_read_entry_by_entry_where_the_pickle_state_does_not_agree() -> None:
    class Odd(DescList):
        def __getstate__(self) -> bytes:
            return b"\0" * 24 * len(self._rows) + b"|"

    rows = [(i + 1, i + 2, 0) for i in range(20)]
    assert nixl.descriptors(Odd(rows)).tolist() == nixl.descriptors(DescList(rows)).tolist()
    assert nixl.descriptors(DescList(rows)).tolist() == [list(row[:2]) for row in rows]


def test_a_handle_posted_twice_is_two_transfers(recording: Recording, agent_class: type[Agent]) -> None:
    agent = agent_class()
    handle = agent.initialize_xfer("WRITE", DescList([(1, 2, 0)]), DescList([(3, 2, 0)]), "right")
    for room in (1, 2):
        agent.answers = ["DONE"]
        with recording.recorder.about(room):
            agent.transfer(handle)
    events = recording.events()
    first, second = kinds(events, Send)
    assert first.transfer != second.transfer
    assert (first.room, second.room) == (1, 2)
    assert second.source.tolist() == [[1, 2]]


def test_a_handle_number_that_the_library_uses_again_is_a_new_transfer(
    recording: Recording, agent_class: type[Agent]
) -> None:
    agent = agent_class()
    for address in (1, 7):
        agent._handles = 5
        handle = agent.initialize_xfer("WRITE", DescList([(address, 2, 0)]), DescList([(3, 2, 0)]), "right")
        agent.transfer(handle)
    assert [send.source.tolist() for send in kinds(recording.events(), Send)] == [[[1, 2]], [[7, 2]]]


@pytest.mark.parametrize("answer", ["RAISE", "NONE"])
@pytest.mark.parametrize("way", ["initialize_xfer", "make_prepped_xfer"])
def test_a_transfer_that_the_library_refuses_before_its_post_is_told_as_failed(
    recording: Recording, agent_class: type[Agent], way: str, answer: str
) -> None:
    agent = agent_class()
    looked: list[int] = []
    recording.adapter.before_post.append(lambda post: looked.append(post.transfer))
    source, target = [(0x1000, 64, 0), (0x1040, 64, 0)], [(0x9000, 64, 0), (0x9040, 64, 0)]
    sides = agent.prep_xfer_dlist("", DescList(source)), agent.prep_xfer_dlist("right", DescList(target))

    def make() -> Any:
        if way == "initialize_xfer":
            return agent.initialize_xfer("WRITE", DescList(source), DescList(target), "right")
        return agent.make_prepped_xfer("WRITE", sides[0], [0, 1], sides[1], [1, 0])

    about = recording.recorder.about(7719, 1, 2, True, logical=4, pages=[3, 1], destination_pages=[8, 9])
    agent.answers = [answer]
    with about:
        if answer == "RAISE":
            with pytest.raises(RuntimeError, match="no backend for these descriptors"):
                make()
        else:
            assert make() is None
        agent.transfer(make())  # another try is another transfer
    events = recording.events()
    first, second = kinds(events, Send)
    for send in (first, second):
        assert (send.room, send.attempt, send.chunk, send.last, send.peer) == (7719, 1, 2, True, "right")
        assert (send.logical, send.pages.tolist(), send.destination_pages.tolist()) == (4, [3, 1], [8, 9])
        assert send.source.tolist() == [list(row[:2]) for row in source]
        order = target if way == "initialize_xfer" else target[::-1]
        assert send.destination.tolist() == [list(row[:2]) for row in order]
    why = f"RuntimeError in {way}" if answer == "RAISE" else f"no handle from {way}"
    states = [(s.transfer, s.state, s.room, s.attempt, s.detail) for s in kinds(events, TransferState)]
    assert states == [
        (first.transfer, "error", 7719, 1, why),
        (second.transfer, "posted", 7719, 1, ""),
    ]
    assert looked == [first.transfer, second.transfer]
    assert not kinds(events, Loss)


def test_a_transfer_that_fails_later_is_told_once(recording: Recording, agent_class: type[Agent]) -> None:
    agent = agent_class()
    handle = agent.initialize_xfer("WRITE", DescList([(1, 2, 0)]), DescList([(3, 2, 0)]), "right")
    agent.transfer(handle)
    agent.answers = ["ERR", "ERR"]
    agent.check_xfer_state(handle)
    agent.check_xfer_state(handle)
    assert [state.state for state in kinds(recording.events(), TransferState)] == ["posted", "error"]


def test_a_handle_from_before_capture_makes_the_send_hook_incomplete(
    recording: Recording, agent_class: type[Agent]
) -> None:
    agent_class().transfer(Handle(4))
    events = recording.events()
    assert len(kinds(events, Send)) == 1
    assert not hooks(events)["nixl.transfer"].complete


def test_transfers_that_device_code_posts_make_the_send_hook_incomplete(
    recording: Recording, agent_class: type[Agent]
) -> None:
    assert agent_class().prep_mem_view(None) == 1
    assert not hooks(recording.events())["nixl.transfer"].complete


def test_a_method_that_this_version_lacks_is_told_as_missing(
    tmp_path: Path, agent_class: type[Agent]
) -> None:
    del agent_class.make_prepped_xfer
    events = Recording(tmp_path, agent_class).events()
    assert hooks(events)["nixl.make_prepped_xfer"].state == "missing"
    assert hooks(events)["nixl.initialize_xfer"].state == "attached"


def test_registrations_have_address_length_and_memory(recording: Recording, agent_class: type[Agent]) -> None:
    agent_class().register_memory([(4096, 1 << 20, 3, "")], "VRAM")
    (found,) = kinds(recording.events(), Registration)
    assert (found.agent, found.address, found.length, found.device, found.memory) == (
        "left",
        4096,
        1 << 20,
        3,
        "VRAM",
    )


def test_notifications_order_their_sender_before_their_receiver(
    recording: Recording, agent_class: type[Agent]
) -> None:
    left, right = agent_class("left"), agent_class("right")
    handle = left.initialize_xfer("WRITE", DescList([(1, 2, 0)]), DescList([(3, 2, 0)]), "right", b"done 7")
    left.transfer(handle)
    left.send_notif("right", b"hello")
    left.send_notif("right", b"hello")
    right.arrived = {"left": [b"hello", b"done 7"]}
    right.get_new_notifs()
    right.arrived = {"left": [b"hello"]}
    right.update_notifs()
    right.update_notifs()
    order = kinds(recording.events(), Order)
    tails = Counter(event.key for event in order if event.end == "tail")
    heads = Counter(event.key for event in order if event.end == "head")
    assert tails == heads
    assert set(tails.values()) == {1}, "equal messages have different keys"
    assert len(tails) == 3
    assert not any("hello" in key or "done" in key for key in tails), "messages are the engine's own"


def test_a_looked_up_notification_is_a_head_too(recording: Recording, agent_class: type[Agent]) -> None:
    left, right = agent_class("left"), agent_class("right")
    for message in (b"a", b"b"):
        left.send_notif("right", message)
    right.arrived = {"left": [b"a", b"b"]}
    assert right.check_remote_xfer_done("left", b"a")
    assert right.check_remote_xfer_done("left", b"b")
    assert not right.check_remote_xfer_done("left", b"c")
    order = kinds(recording.events(), Order)
    assert Counter(e.key for e in order if e.end == "tail") == Counter(
        e.key for e in order if e.end == "head"
    )


def test_an_observer_that_raises_is_counted_and_the_post_goes_on(
    recording: Recording, agent_class: type[Agent]
) -> None:
    def broken(_: Post) -> None:
        raise ValueError("a hook's own fault")

    recording.adapter.before_post.append(broken)
    agent = agent_class()
    handle = agent.initialize_xfer("WRITE", DescList([(1, 2, 0)]), DescList([(3, 2, 0)]), "right")
    assert agent.transfer(handle) == "PROC"
    events = recording.events()
    assert len(kinds(events, Send)) == 1
    assert [loss.count for loss in kinds(events, Loss) if loss.stage == "hook"] == [1]


def test_a_hook_that_always_raises_is_detached_and_the_engine_never_sees_it(
    tmp_path: Path, agent_class: type[Agent]
) -> None:
    found = Recording(tmp_path, agent_class, hook_errors=3)
    agent = agent_class()

    class Hostile:
        @property
        def _handle(self) -> int:
            raise RuntimeError("not a handle")

    for _ in range(6):
        assert agent.transfer(Hostile()) == "PROC"  # type: ignore[arg-type]
    events = found.events()
    assert sum(loss.count for loss in kinds(events, Loss) if loss.stage == "hook") == 3
    assert hooks(events)["nixl.transfer"].state == "detached"


def test_with_the_map_of_a_side_descriptors_say_which_pages_moved() -> None:
    regions = Regions()
    spec = layout("fp8")
    regions.add(4, 12, "index_k", spec, 0x10000, 8, spec.page_bytes)
    rows = np.array([[0x10000 + 8448 * 3, 8448], [0x10000 + 8448 * 6 + 4096, 4352], [5, 10]], np.uint64)
    pieces = nixl.moved(rows, regions)
    assert pieces.page.tolist() == [3, 6, -1]
    assert pieces.layer.tolist() == [12, 12, -1]
    assert (pieces.start.tolist()[1], pieces.stop.tolist()[1]) == (4096, 8448)


@pytest.mark.parametrize("prepared", [False, True])
def test_two_real_agents_move_pages_and_every_step_is_recorded(tmp_path: Path, prepared: bool) -> None:
    api = pytest.importorskip("nixl._api")
    before = {name: vars(api.nixl_agent)[name] for name in nixl.COVERS}
    recorder = Recorder(Options(capture=tmp_path, seal=False), Process("prefill"))
    adapter = nixl.install(recorder)
    assert adapter is not None
    left, right = real_agents()
    size, count = 8448, 24
    source = np.arange(count * size, dtype=np.uint64).astype(np.uint8).reshape(count, size)
    target = np.zeros_like(source)
    held = [
        agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
        for agent, memory in ((left, source), (right, target))
    ]
    peer = left.add_remote_agent(right.get_agent_metadata())
    peer = peer if isinstance(peer, str) else peer.decode()
    pages = np.array([5, 2, 11, 7, 3, 20, 19, 18, 17, 16])
    rows = [
        np.array([[memory.ctypes.data + p * size, size, 0] for p in range(count)], np.uint64)
        for memory in (source, target)
    ]
    if prepared:
        sides = (left.prep_xfer_dlist("", rows[0], "DRAM"), left.prep_xfer_dlist(peer, rows[1], "DRAM"))
        indices = pages.astype(np.int32)
        handle = left.make_prepped_xfer("WRITE", sides[0], indices, sides[1], indices[::-1].copy(), b"room 1")
    else:
        chosen = [left.get_xfer_descs(r, "DRAM") for r in (rows[0][pages], rows[1][pages[::-1]])]
        handle = left.initialize_xfer("WRITE", *chosen, peer, b"room 1")
    state = left.transfer(handle)
    notes: dict[Any, list[bytes]] = {}
    end = time.monotonic() + 20
    while (state == "PROC" or not notes) and time.monotonic() < end:
        state = left.check_xfer_state(handle)
        notes = notes or right.get_new_notifs()
        time.sleep(0.001)
    left.release_xfer_handle(handle)
    assert state == "DONE"
    assert np.array_equal(target[pages[::-1]], source[pages])
    adapter.uninstall()
    recorder.close()
    left.remove_remote_agent(peer)
    left.deregister_memory(held[0])
    right.deregister_memory(held[1])
    assert {name: vars(api.nixl_agent)[name] for name in nixl.COVERS} == before
    events = [event for _, event in JournalReader(recorder.path)]
    (send,) = kinds(events, Send)
    assert send.source.tolist() == rows[0][pages][:, :2].tolist()
    assert send.destination.tolist() == rows[1][pages[::-1]][:, :2].tolist()
    assert (send.agent, send.peer) == ("left-test", "right-test")
    assert [e.state for e in kinds(events, TransferState)] == ["posted", "done", "released"]
    assert {r.address for r in kinds(events, Registration)} == {source.ctypes.data, target.ctypes.data}
    order = kinds(events, Order)
    assert [e.end for e in order] == ["tail", "head"]
    assert order[0].key == order[1].key
    assert all(hook.state == "attached" and hook.complete for hook in hooks(events).values())
