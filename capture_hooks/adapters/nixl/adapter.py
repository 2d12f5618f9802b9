"""The hooks on ``nixl_agent``."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

from capture_hooks.adapters.nixl.kept import Kept
from capture_hooks.adapters.nixl.lists import (
    NONE,
    Prepared,
    chosen,
    descriptors,
    entries,
    memory_of,
    prepared,
)
from capture_hooks.adapters.nixl.notifications import Notifications, agent_name, payload, payloads, text
from capture_hooks.adapters.posts import OVER, Look, Post, tell_post, tell_state
from capture_hooks.events import Registration
from capture_hooks.hooktable import About
from capture_hooks.recorder import Recorder
from capture_hooks.taps.methods import wrapped

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

#: How many transfers that are not over are known by their handles, as many that are, and how many prepared lists; and
#: the bytes of descriptors that they may take. An engine need not release its handles where a hook sees it.
MOST, OPEN_BYTES, OVER_BYTES, LIST_BYTES = 16_384, 256 << 20, 64 << 20, 256 << 20

#: What a post raises before any of it has been given to a backend. Whatever else it raises, a part may be on its way.
_NOT_BEGUN = ("nixlNotFoundError", "nixlRepostActiveError")


class NixlAdapter:
    """The hooks on one ``nixl_agent`` class.

    ``before_post`` and ``after_state`` are lists of functions that get the :class:`Post`: just before it goes
    to the library, and when it is seen done or failed. They run on the engine's thread and inside a guard.
    """

    def __init__(self, recorder: Recorder, agent_class: type[Any]) -> None:
        self.recorder = recorder
        self.before_post: list[Look] = []
        self.after_state: list[Look] = []
        self._class = agent_class
        self._originals: dict[str, Method] = {}
        self._wrappers: dict[str, Method] = {}
        self._ids = itertools.count()
        self._lists: Kept[Prepared] = Kept(MOST, LIST_BYTES, lambda listed: listed.nbytes)
        self._open: Kept[Post] = Kept(MOST, OPEN_BYTES, _size)  # by handle: planned, or on their way
        self._over: Kept[Post] = Kept(MOST, OVER_BYTES, _size)  # by handle: may be posted again
        self._notes = Notifications(recorder, self._messages_forgotten)
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
        for name, body in (
            dict.fromkeys(_UNSEEN, self._unseen) | {"release_dlist_handle": self._unlist}
        ).items():
            original = self._class.__dict__.get(name)
            if callable(original):
                self._wrap(name, original, body)
        return self

    def uninstall(self) -> None:
        """Put the originals back. A wrapper that somebody else wrapped in turn stays, and only passes through."""
        self._off = True
        for name, original in self._originals.items():
            if self._class.__dict__.get(name) is self._wrappers[name]:
                setattr(self._class, name, original)
        self._originals.clear()

    def _wrap(self, name: str, original: Method, body: Callable[..., Any]) -> None:
        wrapper = wrapped(self.recorder, _hook(name), original, around=body, off=lambda: self._off)
        self._originals[name], self._wrappers[name] = original, wrapper
        setattr(self._class, name, wrapper)

    # -- descriptors -----------------------------------------------------------------------------------------

    def _register(self, original: Method, agent: Any, *args: Any, **keywords: Any) -> Any:
        found = original(agent, *args, **keywords)
        with self.recorder.guard("nixl.register_memory"):
            named = _argument(1, "mem_type", None, args, keywords)
            for address, length, device in entries(found):
                memory = memory_of(found) or str(named or "DRAM")
                self.recorder.emit(Registration(agent_name(agent), address, length, device, memory))
        return found

    def _prepare(self, original: Method, agent: Any, *args: Any, **keywords: Any) -> Any:
        handle = original(agent, *args, **keywords)
        with self.recorder.guard("nixl.prep_xfer_dlist"):
            side = str(_argument(0, "agent_name", "", args, keywords))
            given = _argument(1, "xfer_list", None, args, keywords)
            self._lists.pop(_key(handle))
            self._lists.put(_key(handle), prepared(side, given))
        return handle

    def _unlist(self, original: Method, agent: Any, *args: Any, **keywords: Any) -> Any:
        with self.recorder.guard("nixl.prep_xfer_dlist"):
            self._lists.pop(_key(_argument(0, "handle", None, args, keywords)))
        return original(agent, *args, **keywords)

    def _initialize(self, original: Method, agent: Any, *args: Any, **keywords: Any) -> Any:
        def plan() -> Post:
            take = functools.partial(_argument, args=args, keywords=keywords)
            return Post(
                agent_name(agent),
                text(take(3, "remote_agent", "")),
                str(take(0, "operation", "WRITE")),
                descriptors(take(1, "local_descs", None)),
                descriptors(take(2, "remote_descs", None)),
                payload(take(4, "notif_msg", b"")),
            )

        return self._plans("initialize_xfer", plan, original, agent, *args, **keywords)

    def _make(self, original: Method, agent: Any, *args: Any, **keywords: Any) -> Any:
        def plan() -> Post:
            take = functools.partial(_argument, args=args, keywords=keywords)
            local = self._lists.get(_key(take(1, "local_xfer_side", None)))
            remote = self._lists.get(_key(take(3, "remote_xfer_side", None)))
            if local is None or remote is None:
                self._incomplete(_unknown("a list was prepared", self._lists.forgotten))
            return Post(
                agent_name(agent),
                "" if remote is None or remote.agent in _INITIATOR else text(remote.agent),
                str(take(0, "operation", "WRITE")),
                chosen(local, take(2, "local_indices", ())),
                chosen(remote, take(4, "remote_indices", ())),
                payload(take(5, "notif_msg", b"")),
            )

        return self._plans("make_prepped_xfer", plan, original, agent, *args, **keywords)

    def _plans(
        self, name: str, plan: Callable[[], Post], original: Method, agent: Any, *args: Any, **keywords: Any
    ) -> Any:
        """A transfer is made ready. One that the library refuses is never posted: it is told here, as a transfer that
        failed.
        """
        try:
            handle = original(agent, *args, **keywords)
        except BaseException as error:
            with self.recorder.guard(_hook(name)):
                self._refused(name, plan(), f"{type(error).__name__} in {name}")
            raise
        with self.recorder.guard(_hook(name)):
            if handle:
                key = _key(handle)
                self._open.pop(key)  # the library uses the numbers of released handles again
                self._over.pop(key)
                self._open.put(key, plan())
            else:
                self._refused(name, plan(), f"no handle from {name}")
        return handle

    def _refused(self, name: str, plan: Post, detail: str) -> None:
        post = self._numbered(plan)
        tell_post(self.recorder, post, self.before_post, "nixl.before_post")
        self._state(name, post, "error", detail)

    # -- posts and their states ------------------------------------------------------------------------------

    def _find(self, handle: Any) -> Post | None:
        key = _key(handle)
        found = self._open.get(key)
        return found if found is not None else self._over.get(key)

    def _transfer(self, original: Method, agent: Any, *args: Any, **keywords: Any) -> Any:
        post: Post | None = None
        before: Post | None = None
        handle = _argument(0, "handle", None, args, keywords)
        with self.recorder.guard("nixl.transfer"):
            before = self._find(handle)
            post = self._posting(agent, handle, before)
            message = payload(_argument(1, "notif_msg", b"", args, keywords)) or post.notification
            if message:
                self._notes.tail(post.agent, post.peer, message)
        try:
            status = original(agent, *args, **keywords)
        except BaseException as error:
            with self.recorder.guard("nixl.transfer"):
                if post is not None:
                    self._raised(handle, post, before, error)
            raise
        with self.recorder.guard("nixl.transfer"):
            if post is not None:
                self._state("transfer", post, "error" if status == "ERR" else "posted")
                if status == "DONE":
                    self._state("transfer", post, "done")
                self._settle(handle, post)
        return status

    def _posting(self, agent: Any, handle: Any, plan: Post | None) -> Post:
        """Tell that ``handle``, of which ``plan`` is known, is about to be posted."""
        key = _key(handle)
        if plan is None:
            plan = Post(agent_name(agent), "", "WRITE", NONE, NONE)
            self._incomplete(_unknown("a handle was made", self._open.forgotten + self._over.forgotten))
        post = self._numbered(plan)
        self._over.pop(key)
        self._open.put(key, post)
        tell_post(self.recorder, post, self.before_post, "nixl.before_post")
        return post

    def _numbered(self, plan: Post) -> Post:
        """A transfer of its own for one attempt to post ``plan``."""
        return Post(
            plan.agent, plan.peer, plan.operation, plan.source, plan.destination, plan.notification,
            next(self._ids), self.recorder.current(),
        )  # fmt: skip

    def _raised(self, handle: Any, post: Post, before: Post | None, error: BaseException) -> None:
        """A post was refused: before anything of it was sent, or maybe after a part of it was."""
        if type(error).__name__ not in _NOT_BEGUN:
            self._state("transfer", post, "posted")
            self._doubt("transfer", post, error)
            return
        self._state("transfer", post, "error", type(error).__name__)
        if before is not None and before.state == "posted":  # that one is still on its way
            self._open.put(_key(handle), before)
        else:
            self._settle(handle, post)

    def _settle(self, handle: Any, post: Post) -> None:
        """Of a transfer that is over only what another post of its handle needs is kept."""
        if post.state in OVER and self._open.pop(_key(handle), post) is not None:
            about = post.about
            post.about = about and About(about.room, about.attempt, about.chunk, about.last)
            self._over.put(_key(handle), post)

    def _state(self, name: str, post: Post, state: str, detail: str = "") -> None:
        """The post changed its state, as method ``name`` told."""
        if post.state == state:
            return
        with self.recorder.guard(_hook(name)):
            tell_state(self.recorder, post, state, detail, self.after_state)

    def _doubt(self, name: str, post: Post, error: BaseException) -> None:
        """Method ``name`` raised for a transfer that was on its way. That is not its end: NIXL raises so for a peer
        that was removed while it still writes to it, and what a broken connection had taken before may arrive later.
        """
        doubt = f"{type(error).__name__} in {name}: it may still be on its way"
        if post.state == "posted" and post.doubt != doubt:
            post.doubt = doubt
            tell_state(self.recorder, post, "posted", doubt, ())

    def _check(self, original: Method, agent: Any, *args: Any, **keywords: Any) -> Any:
        handle = _argument(0, "handle", None, args, keywords)
        try:
            status = original(agent, *args, **keywords)
        except Exception as error:
            with self.recorder.guard("nixl.check_xfer_state"):
                post = self._find(handle)
                if post is not None:
                    self._doubt("check_xfer_state", post, error)
            raise
        if status != "PROC":
            with self.recorder.guard("nixl.check_xfer_state"):
                self._ended(handle, "done" if status == "DONE" else "error")
        return status

    def _ended(self, handle: Any, state: str) -> None:
        """The transfer that a call asked about is over."""
        post = self._find(handle)
        if post is None:
            if self._open.forgotten:
                why = "a transfer was seen to end that had been forgotten: too many were on their way"
                self.recorder.incomplete(_hook("check_xfer_state"), why)
        elif post.state == "posted":
            self._state("check_xfer_state", post, state)
            self._settle(handle, post)

    def _release(self, original: Method, agent: Any, *args: Any, **keywords: Any) -> Any:
        post, key = None, 0
        with self.recorder.guard("nixl.release_xfer_handle"):
            # Out of the tables first: another thread may be given the same number as soon as it is free.
            key = _key(_argument(0, "handle", None, args, keywords))
            found = self._open.pop(key)
            post = found if found is not None else self._over.pop(key)
        try:
            result = original(agent, *args, **keywords)
        except BaseException as error:
            # One that cannot be cancelled is still on its way, and will be asked for again.
            with self.recorder.guard("nixl.release_xfer_handle"):
                if post is not None:
                    (self._over if post.state in OVER else self._open).put(key, post)
                    self._doubt("release_xfer_handle", post, error)
            raise
        if post is not None and post.transfer >= 0:
            # A handle that is released early is no proof that nothing is written any more.
            detail = "" if post.state in OVER else "it was not seen to end"
            self._state("release_xfer_handle", post, "released", detail)
        return result

    def _unseen(self, original: Method, agent: Any, *args: Any, **keywords: Any) -> Any:
        with self.recorder.guard("nixl.transfer"):
            self._incomplete("device code posts transfers itself")
        return original(agent, *args, **keywords)

    def _incomplete(self, why: str) -> None:
        self.recorder.incomplete(_hook("transfer"), why)

    def _messages_forgotten(self) -> None:
        for name in ("send_notif", "get_new_notifs"):
            why = "of very many messages the first are forgotten: one that comes again is taken for new"
            self.recorder.incomplete(_hook(name), why)

    # -- notifications ---------------------------------------------------------------------------------------

    def _send_notif(self, original: Method, agent: Any, *args: Any, **keywords: Any) -> Any:
        with self.recorder.guard("nixl.send_notif"):
            peer = text(_argument(0, "remote_agent_name", "", args, keywords))
            self._notes.tail(agent_name(agent), peer, payload(_argument(1, "notif_msg", b"", args, keywords)))
        return original(agent, *args, **keywords)

    def _new_notifs(self, original: Method, agent: Any, *args: Any, **keywords: Any) -> Any:
        found = original(agent, *args, **keywords)
        if found:
            with self.recorder.guard("nixl.get_new_notifs"):
                self._notes.heads(agent, payloads(found))
        return found

    def _update_notifs(self, original: Method, agent: Any, *args: Any, **keywords: Any) -> Any:
        found = original(agent, *args, **keywords)
        if found:
            with self.recorder.guard("nixl.update_notifs"):
                self._notes.look(agent, Counter(payloads(found)))
        return found

    def _remote_done(self, original: Method, agent: Any, *args: Any, **keywords: Any) -> Any:
        found = original(agent, *args, **keywords)
        with self.recorder.guard("nixl.check_remote_xfer_done"):
            left = Counter(payloads(getattr(agent, "notifs", None) or {}))
            known = self._notes.held(agent)
            peer = text(_argument(0, "remote_agent_name", "", args, keywords))
            tag = payload(_argument(1, "lookup_tag", b"", args, keywords))
            if found and not any(sender == peer and tag in message for sender, message in known - left):
                # It came and went within the call: all that is known of it is what was looked for.
                self._notes.heads(agent, [(peer, tag)])
            self._notes.look(agent, left)
        return found


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


def _argument(place: int, name: str, default: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Argument ``name`` of a call, whether it was given by place or by name."""
    return args[place] if place < len(args) else keywords.get(name, default)


def _hook(name: str) -> str:
    return f"nixl.{name}"


def _unknown(what: str, forgotten: int) -> str:
    """Why something that a call names is not known."""
    return f"{what} before capture began" + (", or so long ago that it is forgotten" if forgotten else "")


def _size(post: Post) -> int:
    return post.source.nbytes + post.destination.nbytes


def _key(handle: Any) -> int:
    return int(getattr(handle, "_handle", 0) or id(handle))
