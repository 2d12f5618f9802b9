"""The hooks on ``nixl_agent``."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

from capture_hooks.adapters.nixl.lists import (
    NONE,
    Prepared,
    chosen,
    descriptors,
    entries,
    memory_of,
)
from capture_hooks.adapters.nixl.notifications import Notifications, agent_name, payload, payloads, text
from capture_hooks.adapters.posts import Look, Post, tell_post, tell_state
from capture_hooks.events import Registration
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
        self._prepared: dict[int, Prepared] = {}
        self._planned: dict[int, Post] = {}  # by handle; also those on their way
        self._notes = Notifications(recorder)
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
            self._prepared[_key(handle)] = Prepared(side, descriptors(given))
        return handle

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
            local = self._prepared.get(_key(take(1, "local_xfer_side", None)))
            remote = self._prepared.get(_key(take(3, "remote_xfer_side", None)))
            if local is None or remote is None:
                self._incomplete("a list was prepared before capture began")
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
                self._planned[_key(handle)] = plan()
            else:
                self._refused(name, plan(), f"no handle from {name}")
        return handle

    def _refused(self, name: str, plan: Post, detail: str) -> None:
        post = self._numbered(plan)
        tell_post(self.recorder, post, self.before_post, "nixl.before_post")
        self._state(name, post, "error", detail)

    # -- posts and their states ------------------------------------------------------------------------------

    def _transfer(self, original: Method, agent: Any, *args: Any, **keywords: Any) -> Any:
        post: Post | None = None
        with self.recorder.guard("nixl.transfer"):
            post = self._posting(agent, _argument(0, "handle", None, args, keywords))
            message = payload(_argument(1, "notif_msg", b"", args, keywords)) or post.notification
            if message:
                self._notes.tail(post.agent, post.peer, message)
        try:
            status = original(agent, *args, **keywords)
        except BaseException as error:
            self._state("transfer", post, "error", type(error).__name__)
            raise
        self._state("transfer", post, "error" if status == "ERR" else "posted")
        if status == "DONE":
            self._state("transfer", post, "done")
        return status

    def _posting(self, agent: Any, handle: Any) -> Post:
        """Tell that ``handle`` is about to be posted."""
        key = _key(handle)
        plan = self._planned.get(key)
        if plan is None:  # made before capture began
            plan = Post(agent_name(agent), "", "WRITE", NONE, NONE)
            self._incomplete("a handle was made before capture began")
        post = self._planned[key] = self._numbered(plan)
        tell_post(self.recorder, post, self.before_post, "nixl.before_post")
        return post

    def _numbered(self, plan: Post) -> Post:
        """A transfer of its own for one attempt to post ``plan``."""
        return Post(
            plan.agent, plan.peer, plan.operation, plan.source, plan.destination, plan.notification,
            next(self._ids), self.recorder.current(),
        )  # fmt: skip

    def _state(self, name: str, post: Post | None, state: str, detail: str = "") -> None:
        """The post changed its state, as method ``name`` told."""
        if post is None or post.state == state:
            return
        with self.recorder.guard(_hook(name)):
            tell_state(self.recorder, post, state, detail, self.after_state)

    def _check(self, original: Method, agent: Any, *args: Any, **keywords: Any) -> Any:
        try:
            status = original(agent, *args, **keywords)
        except Exception as error:  # how NIXL tells of a peer that is gone
            self._ended("error", type(error).__name__, args, keywords)
            raise
        if status != "PROC":
            self._ended("done" if status == "DONE" else "error", "", args, keywords)
        return status

    def _ended(self, state: str, detail: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """The transfer that a call asked about is over."""
        with self.recorder.guard("nixl.check_xfer_state"):
            post = self._planned.get(_key(_argument(0, "handle", None, args, keywords)))
            if post is not None and post.transfer >= 0 and post.state == "posted":
                self._state("check_xfer_state", post, state, detail)

    def _release(self, original: Method, agent: Any, *args: Any, **keywords: Any) -> Any:
        post, key = None, 0
        with self.recorder.guard("nixl.release_xfer_handle"):
            # Out of the table first: another thread may be given the same number as soon as it is free.
            key = _key(_argument(0, "handle", None, args, keywords))
            post = self._planned.pop(key, None)
        try:
            found = original(agent, *args, **keywords)
        except BaseException:
            # One that cannot be cancelled is still on its way, and will be asked for again.
            if post is not None:
                self._planned[key] = post
            raise
        if post is not None and post.transfer >= 0:
            detail = "" if post.state in ("done", "error") else "it was not seen to end"
            self._state("release_xfer_handle", post, "released", detail)
        return found

    def _unseen(self, original: Method, agent: Any, *args: Any, **keywords: Any) -> Any:
        with self.recorder.guard("nixl.transfer"):
            self._incomplete("device code posts transfers itself")
        return original(agent, *args, **keywords)

    def _incomplete(self, why: str) -> None:
        self.recorder.incomplete(_hook("transfer"), why)

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


def _key(handle: Any) -> int:
    return int(getattr(handle, "_handle", 0) or id(handle))
