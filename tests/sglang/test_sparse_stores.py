"""Stores of V3.2: which token goes to which slot, with a session of one buffer in the place of the real one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from capture_hooks.adapters.sglang.sparse import SparseHooks


def stored(slots: list[int]) -> tuple[list[Any], list[str]]:
    """Stores and complaints after a pass of two requests, of 3 and 2 tokens, into ``slots``."""
    emitted: list[Any] = []
    closed: list[str] = []
    buffer = SimpleNamespace(number=4, judged=True, layer=0)
    rows = [
        SimpleNamespace(
            index=n,
            held=SimpleNamespace(room=70 + n, attempt=0),
            before=before,
            length=before + tokens,
            start=start,
        )
        for n, (before, tokens, start) in enumerate([(0, 3, 0), (5, 2, 3)])
    ]
    step = SimpleNamespace(extend=True, rows=rows, stores=set(), parts=[], line=0, number=1)
    step.take_once = lambda _, tensor: 0
    session = SimpleNamespace(
        steps=SimpleNamespace(now=step),
        buffers=SimpleNamespace(judged=[buffer], pooled=False),
        recorder=SimpleNamespace(
            stamp=lambda *_: None, emit_at=lambda record, _: emitted.append(record), guard=None
        ),
    )
    hooks = SparseHooks(session, SimpleNamespace(incomplete=closed.append))  # type: ignore[arg-type]
    hooks.set(None, None, 0, torch.tensor(slots))
    for part in step.parts:
        part(step, [np.array(slots)])
    return emitted, closed


def test_each_request_has_the_slots_of_its_own_tokens() -> None:
    emitted, closed = stored([64, 65, 66, 133, 134])
    assert closed == []
    assert [(s.room, s.slots.tolist(), s.logical_rows.tolist()) for s in emitted] == [
        (70, [64, 65, 66], [0, 1, 2]),
        (71, [133, 134], [5, 6]),
    ]


def test_slots_of_some_tokens_alone_say_of_none_where_it_went() -> None:
    emitted, closed = stored([64, 65, 133])
    assert emitted == []
    assert len(closed) == 1
    assert "fewer slots than tokens" in closed[0]
