"""NIXL at the wire level: what an agent registers, posts and learns, whatever engine drives it.

``install(recorder)`` wraps methods of ``nixl_agent``; ``uninstall()`` puts the very same functions back. The
engine need not be known: a :class:`~capture_hooks.events.Send` has the descriptors of both sides in bytes, from
plain lists and from prepared ones, and ``moved`` says with the map of a process which pages those are. An
engine's hook further up may tell which request is worked on (``Recorder.about``); these keywords of it go into
the Send: ``written`` (a number, or a function that is asked just before the post), ``awaited``, ``logical``,
``pages``, ``destination_pages``, ``item_lengths``.

Nothing is waited for and nothing is raised into the engine.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from capture_hooks.events import Order, Registration, Send, TransferState
from capture_hooks.hooktable import About
from capture_hooks.recorder import Recorder
from capture_hooks.regions import Pieces, Regions

U64 = npt.NDArray[np.uint64]
Method = Callable[..., Any]

#: Methods that are wrapped: what their hook covers.
COVERS = {
    "register_memory": "registration",
    "prep_xfer_dlist": "descriptors",
    "initialize_xfer": "descriptors",
    "make_prepped_xfer": "descriptors",
    "transfer": "send",
    "check_xfer_state": "completion",
    "release_xfer_handle": "completion",
    "send_notif": "notification",
    "get_new_notifs": "notification",
    "update_notifs": "notification",
    "check_remote_xfer_done": "notification",
}
#: Ways to move bytes that these hooks cannot see; a call to one makes the send hook incomplete.
_UNSEEN = ("prep_mem_view",)
_INITIATOR = ("", "NIXL_INIT_AGENT")


@dataclass(eq=False, slots=True)
class Post:
    """One transfer that is being posted or on its way. ``source``/``destination`` are ``uint64[n, 2]``."""

    agent: str
    peer: str
    operation: str
    source: U64
    destination: U64
    notification: bytes = b""
    transfer: int = -1
    about: About | None = None
    state: str = ""


@dataclass(eq=False, slots=True)
class _Prepared:
    """A prepared descriptor list: its agent ("" = the initiator) and its addresses and lengths."""

    agent: str
    descriptors: U64


@dataclass(eq=False, slots=True)
class _Notes:
    """How often each message was seen in each direction, so that equal messages get different keys."""

    sent: Counter[tuple[str, str, bytes]] = field(default_factory=Counter)
    seen: Counter[tuple[str, str, bytes]] = field(default_factory=Counter)
    kept: dict[int, Counter[tuple[str, bytes]]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


class NixlAdapter:
    """The hooks on one ``nixl_agent`` class.

    ``before_post`` and ``after_state`` are lists of functions that get the :class:`Post`: just before it goes
    to the library, and when it is seen done or failed. They run on the engine's thread and inside a guard.
    """

    def __init__(self, recorder: Recorder, agent_class: type[Any]) -> None:
        self.recorder = recorder
        self.before_post: list[Callable[[Post], None]] = []
        self.after_state: list[Callable[[Post], None]] = []
        self._class = agent_class
        self._originals: dict[str, Method] = {}
        self._wrappers: dict[str, Method] = {}
        self._ids = itertools.count()
        self._prepared: dict[int, _Prepared] = {}
        self._planned: dict[int, Post] = {}  # by handle; also those on their way
        self._notes = _Notes()
        self._off = False

    # -- wrapping --------------------------------------------------------------------------------------------

    def install(self) -> NixlAdapter:
        """Wrap every method that this version of NIXL has; the others are told as missing."""
        bodies = {
            "register_memory": self._register,
            "prep_xfer_dlist": self._prepare,
            "initialize_xfer": self._initialize,
            "make_prepped_xfer": self._make,
            "transfer": self._transfer,
            "check_xfer_state": self._check,
            "release_xfer_handle": self._release,
            "send_notif": self._send_notif,
            "get_new_notifs": self._new_notifs,
            "update_notifs": self._update_notifs,
            "check_remote_xfer_done": self._remote_done,
        }
        for name, body in bodies.items():
            original = self._class.__dict__.get(name)
            if not callable(original):
                self.recorder.hook(_hook(name), COVERS[name], "missing", False, "not in this version of NIXL")
                continue
            self._wrap(name, original, body)
            self.recorder.hook(_hook(name), COVERS[name])
        for name in _UNSEEN:
            original = self._class.__dict__.get(name)
            if callable(original):
                self._wrap(name, original, self._unseen)
        return self

    def uninstall(self) -> None:
        """Put the originals back. A wrapper that somebody else wrapped in turn stays, and only passes through."""
        self._off = True
        for name, original in self._originals.items():
            if self._class.__dict__.get(name) is self._wrappers[name]:
                setattr(self._class, name, original)
        self._originals.clear()

    def _wrap(self, name: str, original: Method, body: Callable[..., Any]) -> None:
        hook = _hook(name)

        @functools.wraps(original)
        def wrapper(*args: Any, **keywords: Any) -> Any:
            if self._off or self.recorder.closed or self.recorder.detached(hook):
                return original(*args, **keywords)
            self.recorder.fired(hook)
            return body(original, *args, **keywords)

        self._originals[name], self._wrappers[name] = original, wrapper
        setattr(self._class, name, wrapper)

    # -- descriptors -----------------------------------------------------------------------------------------

    def _register(self, original: Method, agent: Any, *args: Any, **keywords: Any) -> Any:
        found = original(agent, *args, **keywords)
        with self.recorder.guard("nixl.register_memory"):
            named = _argument(1, "mem_type", None, args, keywords)
            for address, length, device in _entries(found):
                memory = _memory_of(found) or str(named or "DRAM")
                self.recorder.emit(Registration(_name(agent), address, length, device, memory))
        return found

    def _prepare(self, original: Method, agent: Any, *args: Any, **keywords: Any) -> Any:
        handle = original(agent, *args, **keywords)
        with self.recorder.guard("nixl.prep_xfer_dlist"):
            side = str(_argument(0, "agent_name", "", args, keywords))
            given = _argument(1, "xfer_list", None, args, keywords)
            self._prepared[_key(handle)] = _Prepared(side, descriptors(given))
        return handle

    def _initialize(self, original: Method, agent: Any, *args: Any, **keywords: Any) -> Any:
        handle = original(agent, *args, **keywords)
        with self.recorder.guard("nixl.initialize_xfer"):
            take = functools.partial(_argument, args=args, keywords=keywords)
            self._planned[_key(handle)] = Post(
                _name(agent),
                _text(take(3, "remote_agent", "")),
                str(take(0, "operation", "WRITE")),
                descriptors(take(1, "local_descs", None)),
                descriptors(take(2, "remote_descs", None)),
                _message(take(4, "notif_msg", b"")),
            )
        return handle

    def _make(self, original: Method, agent: Any, *args: Any, **keywords: Any) -> Any:
        handle = original(agent, *args, **keywords)
        with self.recorder.guard("nixl.make_prepped_xfer"):
            take = functools.partial(_argument, args=args, keywords=keywords)
            local = self._prepared.get(_key(take(1, "local_xfer_side", None)))
            remote = self._prepared.get(_key(take(3, "remote_xfer_side", None)))
            self._planned[_key(handle)] = Post(
                _name(agent),
                "" if remote is None or remote.agent in _INITIATOR else _text(remote.agent),
                str(take(0, "operation", "WRITE")),
                _chosen(local, take(2, "local_indices", ())),
                _chosen(remote, take(4, "remote_indices", ())),
                _message(take(5, "notif_msg", b"")),
            )
            if local is None or remote is None:
                self._incomplete("a list was prepared before capture began")
        return handle

    # -- posts and their states ------------------------------------------------------------------------------

    def _transfer(self, original: Method, agent: Any, *args: Any, **keywords: Any) -> Any:
        post: Post | None = None
        with self.recorder.guard("nixl.transfer"):
            post = self._posting(agent, _argument(0, "handle", None, args, keywords))
            message = _message(_argument(1, "notif_msg", b"", args, keywords)) or post.notification
            if message:
                self._tail(post.agent, post.peer, message)
        try:
            status = original(agent, *args, **keywords)
        except BaseException as error:
            self._state(post, "error", type(error).__name__)
            raise
        self._state(post, "error" if status == "ERR" else "posted")
        if status == "DONE":
            self._state(post, "done")
        return status

    def _posting(self, agent: Any, handle: Any) -> Post:
        """Tell that ``handle`` is about to be posted."""
        key = _key(handle)
        plan = self._planned.get(key)
        if plan is None:  # made before capture began
            plan = Post(_name(agent), "", "WRITE", _NONE, _NONE)
            self._incomplete("a handle was made before capture began")
        about = self.recorder.current()
        post = Post(
            plan.agent, plan.peer, plan.operation, plan.source, plan.destination, plan.notification,
            next(self._ids), about,
        )  # fmt: skip
        self._planned[key] = post
        more = dict(about.more) if about is not None else {}
        written = more.get("written", -1)
        if callable(written):
            # Asked first: if it says "finished", everything that looks at the source from here on sees all of it.
            written = written()
        with self.recorder.guard("nixl.before_post"):
            for look in self.before_post:
                look(post)
        self.recorder.emit(
            Send(
                post.transfer,
                about.room if about else -1,
                about.attempt if about else 0,
                about.chunk if about else -1,
                about.last if about else False,
                post.agent,
                post.peer,
                post.operation,
                int(written),
                int(more.get("awaited", -1)),
                int(more.get("logical", -1)),
                np.asarray(more.get("pages", ()), np.int64),
                np.asarray(more.get("destination_pages", ()), np.int64),
                np.asarray(more.get("item_lengths", ()), np.int64),
                post.source,
                post.destination,
            )
        )
        return post

    def _state(self, post: Post | None, state: str, detail: str = "") -> None:
        """The post changed its state."""
        if post is None or post.state == state:
            return
        post.state = state
        with self.recorder.guard("nixl.state"):
            about = post.about
            self.recorder.emit(
                TransferState(
                    state,
                    post.transfer,
                    about.room if about else -1,
                    about.attempt if about else 0,
                    post.agent,
                    detail,
                )
            )
            if state in ("done", "error"):
                for look in self.after_state:
                    look(post)

    def _check(self, original: Method, agent: Any, *args: Any, **keywords: Any) -> Any:
        status = original(agent, *args, **keywords)
        if status != "PROC":
            with self.recorder.guard("nixl.check_xfer_state"):
                post = self._planned.get(_key(_argument(0, "handle", None, args, keywords)))
                if post is not None and post.transfer >= 0 and post.state == "posted":
                    self._state(post, "done" if status == "DONE" else "error")
        return status

    def _release(self, original: Method, agent: Any, *args: Any, **keywords: Any) -> Any:
        post: Post | None = None
        with self.recorder.guard("nixl.release_xfer_handle"):
            post = self._planned.pop(_key(_argument(0, "handle", None, args, keywords)), None)
        found = original(agent, *args, **keywords)
        if post is not None and post.transfer >= 0:
            self._state(post, "released", "" if post.state in ("done", "error") else "it was not seen to end")
        return found

    def _unseen(self, original: Method, agent: Any, *args: Any, **keywords: Any) -> Any:
        with self.recorder.guard("nixl.prep_mem_view"):
            self._incomplete("device code posts transfers itself")
        return original(agent, *args, **keywords)

    def _incomplete(self, why: str) -> None:
        self.recorder.hook(_hook("transfer"), COVERS["transfer"], "attached", False, why)

    # -- notifications ---------------------------------------------------------------------------------------

    def _tail(self, sender: str, receiver: str, message: bytes) -> None:
        key = sender, receiver, message
        with self._notes.lock:
            self._notes.sent[key] += 1
            count = self._notes.sent[key]
        self.recorder.emit(Order("notify", _order_key(*key, count), "tail"))

    def _heads(self, agent: Any, messages: Iterable[tuple[str, bytes]]) -> None:
        receiver = _name(agent)
        for sender, message in messages:
            key = sender, receiver, message
            with self._notes.lock:
                self._notes.seen[key] += 1
                count = self._notes.seen[key]
            self.recorder.emit(Order("notify", _order_key(*key, count), "head"))

    def _send_notif(self, original: Method, agent: Any, *args: Any, **keywords: Any) -> Any:
        with self.recorder.guard("nixl.send_notif"):
            peer = _text(_argument(0, "remote_agent_name", "", args, keywords))
            self._tail(_name(agent), peer, _message(_argument(1, "notif_msg", b"", args, keywords)))
        return original(agent, *args, **keywords)

    def _new_notifs(self, original: Method, agent: Any, *args: Any, **keywords: Any) -> Any:
        found = original(agent, *args, **keywords)
        if found:
            with self.recorder.guard("nixl.get_new_notifs"):
                self._heads(agent, _messages(found))
        return found

    def _update_notifs(self, original: Method, agent: Any, *args: Any, **keywords: Any) -> Any:
        found = original(agent, *args, **keywords)
        if found:
            with self.recorder.guard("nixl.update_notifs"):
                self._since_last_look(agent, Counter(_messages(found)))
        return found

    def _remote_done(self, original: Method, agent: Any, *args: Any, **keywords: Any) -> Any:
        found = original(agent, *args, **keywords)
        with self.recorder.guard("nixl.check_remote_xfer_done"):
            left = Counter(_messages(getattr(agent, "notifs", None) or {}))
            known = self._notes.kept.get(id(agent), Counter())
            peer = _text(_argument(0, "remote_agent_name", "", args, keywords))
            tag = _message(_argument(1, "lookup_tag", b"", args, keywords))
            if found and not any(sender == peer and tag in message for sender, message in known - left):
                # It came and went within the call: all that is known of it is what was looked for.
                self._heads(agent, [(peer, tag)])
            self._since_last_look(agent, left)
        return found

    def _since_last_look(self, agent: Any, held: Counter[tuple[str, bytes]]) -> None:
        """Heads for messages that the agent did not hold when it was looked at last."""
        known = self._notes.kept.get(id(agent), Counter())
        self._heads(agent, (held - known).elements())
        self._notes.kept[id(agent)] = held


def install(recorder: Recorder) -> NixlAdapter | None:
    """Hook the installed NIXL. ``None`` where there is none (told in the hook table). Never raises."""
    try:
        from nixl._api import nixl_agent
    except Exception as error:
        recorder.hook("nixl", "send", "missing", False, f"nixl cannot be imported: {type(error).__name__}")
        return None
    with recorder.guard("nixl.install"):
        return NixlAdapter(recorder, nixl_agent).install()
    return None


def moved(descriptors: U64, regions: Regions) -> Pieces:
    """Which pages the descriptors ``uint64[n, 2]`` (address, length) of one side are, by that side's map."""
    return regions.resolve_many(
        np.ascontiguousarray(descriptors[:, 0]), np.ascontiguousarray(descriptors[:, 1])
    )


_NONE: U64 = np.zeros((0, 2), np.uint64)


def descriptors(given: Any) -> U64:
    """Addresses and lengths of any form of descriptor list that NIXL takes: ``uint64[n, 2]``.

    Forms: ``nixlXferDList``, list of tuples (address, length, device), array ``[n, 3]``, strided array ``[n,
    5]`` (address, length, device, stride, count), tensor, list of tensors.
    """
    if given is None:
        return _NONE
    if isinstance(given, np.ndarray):
        table = given.astype(np.uint64, copy=False)
        return _strided(table) if table.shape[1] == 5 else np.array(table[:, :2], np.uint64)
    if hasattr(given, "descCount"):
        return _from_list(given)
    if hasattr(given, "data_ptr"):
        given = [given]
    rows = [
        (item.data_ptr(), item.numel() * item.element_size()) if hasattr(item, "data_ptr") else item[:2]
        for item in given
    ]
    return np.array(rows, np.uint64).reshape(-1, 2)


def _strided(table: U64) -> U64:
    counts = table[:, 4].astype(np.int64)
    row = np.repeat(np.arange(len(table)), counts)
    index = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    address = table[row, 0] + index.astype(np.uint64) * table[row, 3]
    return np.stack([address, table[row, 1]], axis=1)


def _from_list(listed: Any) -> U64:
    """A library's list. Its pickle state has the entries as one block, which is believed only where both ends
    agree.
    """
    count = int(listed.descCount())
    if count == 0:
        return _NONE
    if count > 8:
        state = listed.__getstate__()
        size = 24 * count
        if isinstance(state, bytes) and len(state) > size and state[-1:] == b"|":
            table = np.frombuffer(state, "<u8", 3 * count, len(state) - 1 - size).reshape(count, 3)
            if all(tuple(table[i].tolist()) == tuple(listed[i]) for i in (0, count // 2, count - 1)):
                return np.array(table[:, :2], np.uint64)
    return np.array([listed[i][:2] for i in range(count)], np.uint64)


def _entries(registered: Any) -> list[tuple[int, int, int]]:
    return [tuple(map(int, registered[i][:3])) for i in range(int(registered.descCount()))]  # type: ignore[misc]


def _memory_of(listed: Any) -> str:
    name = getattr(listed.getType(), "name", "") if hasattr(listed, "getType") else ""
    return str(name).removesuffix("_SEG")


def _chosen(prepared: _Prepared | None, indices: Any) -> U64:
    if prepared is None:
        return _NONE
    return prepared.descriptors[np.asarray(indices, np.int64)]


def _argument(place: int, name: str, default: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Argument ``name`` of a call, whether it was given by place or by name."""
    return args[place] if place < len(args) else keywords.get(name, default)


def _hook(name: str) -> str:
    return f"nixl.{name}"


def _key(handle: Any) -> int:
    return int(getattr(handle, "_handle", 0) or id(handle))


def _name(agent: Any) -> str:
    return _text(getattr(agent, "name", ""))


def _text(name: Any) -> str:
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)


def _message(given: Any) -> bytes:
    return given.encode() if isinstance(given, str) else bytes(given)


def _messages(found: dict[Any, list[Any]]) -> list[tuple[str, bytes]]:
    return [(_text(sender), _message(message)) for sender, messages in found.items() for message in messages]


def _order_key(sender: str, receiver: str, message: bytes, count: int) -> str:
    """One key for both ends. Messages are an engine's own and may hold anything, so only a digest of it is
    kept.
    """
    name = b"\0".join([sender.encode(), receiver.encode(), message])
    return f"{xxhash.xxh3_64_hexdigest(name)}.{count}"
