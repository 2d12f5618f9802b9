"""Rows of ``req_to_token``, the table that says where a request's tokens lie: who has one, and how often it was given.

The engine gives a row to one request after another. Its generation is the number of times that this process had
handed it out before, counted by the hooks on what hands rows out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from capture_hooks.adapters.sglang.patch import hook_name
from capture_hooks.adapters.sglang.requests import row_of
from capture_hooks.adapters.sglang.versions import Target, at, only

if TYPE_CHECKING:
    from capture_hooks.adapters.sglang.session import Session
    from capture_hooks.hooktable import Guard

_POOL = "mem_cache.memory_pool"

#: All that hand rows out. 0.5.23 has a function below ``alloc`` that gives rows which no request is bound to.
HOOKS: tuple[Target, ...] = (
    Target(
        "ReqToTokenPool.alloc_rows",
        "request",
        only("0.5.23", _POOL, "ReqToTokenPool.alloc_rows"),
        takes=("need_size",),
    ),
    Target(
        "ReqToTokenPool.alloc",
        "request",
        only("0.5.16", _POOL, "ReqToTokenPool.alloc"),
        takes=("reqs",),
    ),
    Target(
        "DecodeReqToTokenPool.alloc",
        "request",
        at("disaggregation.decode", "DecodeReqToTokenPool.alloc"),
        ("decode",),
        ("reqs",),
    ),
)


class TableRows:
    """The rows of one process. The scheduler's thread alone hands them out and asks."""

    def __init__(self, session: Session) -> None:
        self._recorder = session.recorder
        self._generations: dict[int, int] = {}
        wrap = session.patches.wrap
        wrap("ReqToTokenPool.alloc_rows", after=self.given)
        for name in ("ReqToTokenPool.alloc", "DecodeReqToTokenPool.alloc"):
            wrap(name, around=functools.partial(self.alloc, self._recorder.guard(hook_name(name))))

    def of(self, req: Any) -> tuple[int, int]:
        """Row of a scheduler's request and its generation, -1 each where it is not known."""
        row = row_of(req)
        failed = any(self._recorder.detached(hook_name(target.name)) for target in HOOKS)
        return row, -1 if failed else self._generations.get(row, -1)

    def given(self, rows: Iterable[int] | None, *_: Any, **__: Any) -> None:
        """These rows have been handed out; ``None`` where there were too few."""
        for row in rows or ():
            self._generations[int(row)] = self._generations.get(int(row), -1) + 1

    def alloc(
        self, guard: Guard, original: Callable[..., Any], pool: Any, reqs: Any, *args: Any, **keywords: Any
    ) -> Any:
        """Around an ``alloc``: a request that has a row already (one in chunks) keeps it."""
        fresh: list[Any] = []
        with guard:
            fresh = [req for req in reqs if row_of(req) < 0]
        found = original(pool, reqs, *args, **keywords)
        if found is not None:
            with guard:
                self.given(row for row in map(row_of, fresh) if row >= 0)
        return found


def install(session: Session) -> None:
    """Hook the tables of requests."""
    session.table_rows = TableRows(session)
