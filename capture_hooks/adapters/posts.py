"""A transfer on the wire, told in one way whatever library carries it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from capture_hooks.events import Send, TransferState
from capture_hooks.hooktable import About
from capture_hooks.recorder import Recorder

U64 = npt.NDArray[np.uint64]

#: States in which a transfer writes nothing any more.
OVER = ("done", "error")


@dataclass(eq=False, slots=True)
class Post:
    """One transfer that is being posted or on its way. ``source``/``destination`` are ``uint64[n, 2]``.

    ``doubt`` is what the library raised last of a transfer that may still be on its way, "" if nothing.
    """

    agent: str
    peer: str
    operation: str
    source: U64
    destination: U64
    notification: bytes = b""
    transfer: int = -1
    about: About | None = None
    state: str = ""
    doubt: str = ""


Look = Callable[[Post], None]


def tell_post(recorder: Recorder, post: Post, looks: Iterable[Look], guard: str) -> None:
    """Record that ``post`` is about to go to the library: have ``looks`` look at it, and emit its Send.

    What ``post.about`` says beyond the request (``Recorder.about``) goes into the Send: ``written`` (a number, or a
    function that is asked here), ``awaited``, ``logical``, ``pages``, ``destination_pages``, ``item_lengths``. A look
    that raises is counted under ``guard`` and ends the looks, not the record.
    """
    about = post.about or About(-1)
    more = about.more
    written = more.get("written", -1)
    if callable(written):
        # Asked first: if it says "finished", everything that looks at the source from here on sees all of it.
        written = written()
    with recorder.guard(guard):
        for look in looks:
            look(post)
    recorder.emit(
        Send(
            post.transfer,
            about.room,
            about.attempt,
            about.chunk,
            about.last,
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


def tell_state(recorder: Recorder, post: Post, state: str, detail: str, looks: Iterable[Look]) -> None:
    """Record the state that ``post`` has now; once it is over (:data:`OVER`), have ``looks`` look at it."""
    post.state = state
    about = post.about or About(-1)
    recorder.emit(TransferState(state, post.transfer, about.room, about.attempt, post.agent, detail))
    if state in OVER:
        for look in looks:
            look(post)
