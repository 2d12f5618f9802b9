"""What a fault of the lab did, read from both journals: the deed itself, not the harm that it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from capture_hooks.events import Alloc, Copy, Free, Metadata, Order, Receive, Send, TransferState
from replay.lab.forced import Forced
from tests.integration.lab_rounds import of

#: Role -> events of its journal.
Journals = dict[str, list[Any]]


def _first(events: list[Any], kind: type[Any], **fields: Any) -> int:
    """Where the first event of a kind with these fields is; behind the end where there is none."""
    for index, event in enumerate(events):
        if isinstance(event, kind) and all(getattr(event, name) == value for name, value in fields.items()):
            return index
    return len(events)


def _pages(events: list[Any], kind: type[Any], room: int) -> set[int]:
    return {int(page) for event in of(events, kind) if event.room == room for page in event.pages}


def _own_ids(found: Journals, made: Forced) -> bool:
    sends = [send for send in of(found["prefill"], Send) if send.room == made.room]
    return all(np.array_equal(send.pages, send.destination_pages) for send in sends)


def _source_given_away(found: Journals, made: Forced) -> bool:
    """The donor got pages of the request before its last transfer was over."""
    events = found["prefill"]
    given = _first(events, Alloc, room=made.donor)
    over = [
        i
        for i, e in enumerate(events)
        if isinstance(e, TransferState) and (e.room, e.state) == (made.room, "done")
    ]
    return given < max(over) and bool(_pages(events, Alloc, made.donor) & _pages(events, Alloc, made.room))


def _told_before_the_component(found: Journals, made: Forced) -> bool:
    events = found["prefill"]
    told = _first(events, Order, what="status", key=f"{made.room}.0", end="tail")
    component = max(send.transfer for send in of(events, Send) if send.room == made.room)
    return told < _first(events, TransferState, transfer=component, state="done")


def _told_in_spite_of_an_error(found: Journals, made: Forced) -> bool:
    failed = _first(found["prefill"], TransferState, room=made.room, state="error")
    assert failed < len(found["prefill"]), "the transfer fails in the twin too"
    return _first(found["decode"], TransferState, room=made.room, state="arrived") < len(found["decode"])


def _prompt_cleared(found: Journals, made: Forced) -> bool:
    prompt = _pages(found["decode"], Receive, made.room)
    cleared = {int(page) for e in of(found["decode"], Copy) if e.operation == "clear" for page in e.ids}
    return bool(prompt & cleared)


def _shared_page_given_away(found: Journals, made: Forced) -> bool:
    events = found["decode"]
    shared = {int(p) for e in of(events, Alloc) if e.room == made.room and e.shared for p in e.pages}
    assert shared
    given = _first(events, Alloc, room=made.donor)
    return given < _first(events, Free, room=made.room) and bool(shared & _pages(events, Alloc, made.donor))


def _slot_given_away(found: Journals, made: Forced) -> bool:
    (sent,) = [e for e in of(found["prefill"], Metadata) if (e.room, e.moment) == (made.room, "sent")]
    return sent.holds == made.donor


#: Fault -> whether the journals show what it does. What a kernel does with the padding of a batch is in no journal.
DEEDS: dict[str, Callable[[Journals, Forced], bool]] = {
    "wrong-page-id-space": _own_ids,
    "source-overwritten": _source_given_away,
    "component-late": _told_before_the_component,
    "failed-transfer-used": _told_in_spite_of_an_error,
    "local-clear": _prompt_cleared,
    "freed-page-referenced": _shared_page_given_away,
    "metadata-mix-up": _slot_given_away,
}
