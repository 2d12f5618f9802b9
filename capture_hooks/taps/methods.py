"""Methods of an engine's classes replaced by wrappers that record, and put back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from capture_hooks.recorder import Recorder


class Hooks:
    """The wrapped methods of one process. Hooks are called ``<engine>.<class>.<method>`` in the trace.

    What a hook raises is counted and never reaches the engine; one that fails too often is detached.
    """

    def __init__(self, recorder: Recorder, engine: str) -> None:
        self.recorder = recorder
        self._engine = engine
        self._wrapped: list[tuple[type[Any], str, Callable[..., Any]]] = []

    def wrap(
        self,
        owner: type[Any],
        method: str,
        covers: str,
        *,
        before: Callable[..., Any] | None = None,
        after: Callable[..., Any] | None = None,
        around: Callable[..., Any] | None = None,
        label: str = "",
    ) -> None:
        """Hook ``owner.method``, which the class ``owner`` itself must define (``KeyError`` where it does not).

        ``before`` gets the call's arguments, ``after`` the result and the arguments, and ``around`` the
        original and the arguments; ``around`` has to call the original exactly once and to guard its own work
        (``Recorder.guard``). ``covers`` is what of ``events.Hook`` the method lets the hook see, all of it;
        ``label`` tells two hooks on one method apart.
        """
        original = owner.__dict__[method]
        name = f"{self._engine}.{owner.__name__}.{method}{label and ' ' + label}"
        recorder = self.recorder

        @functools.wraps(original)
        def wrapper(*args: Any, **keywords: Any) -> Any:
            if recorder.closed or recorder.detached(name):
                return original(*args, **keywords)
            recorder.fired(name)
            if around is not None:
                return around(original, *args, **keywords)
            if before is not None:
                with recorder.guard(name):
                    before(*args, **keywords)
            found = original(*args, **keywords)
            if after is not None:
                with recorder.guard(name):
                    after(found, *args, **keywords)
            return found

        setattr(owner, method, wrapper)
        self._wrapped.append((owner, method, original))
        recorder.hook(name, covers)

    def restore(self) -> None:
        """Put every original back."""
        while self._wrapped:
            owner, method, original = self._wrapped.pop()
            setattr(owner, method, original)
