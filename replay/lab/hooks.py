"""Methods of the lab's classes replaced by wrappers that record, and put back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from capture_hooks.events import Order
from capture_hooks.recorder import Recorder


class Hooks:
    """The wrapped methods of one process."""

    def __init__(self, recorder: Recorder, role: str) -> None:
        self.recorder = recorder
        self.role = role
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
        """Hook ``owner.method``.

        ``before`` gets the call's arguments, ``after`` the result and the arguments, and ``around`` the
        original and the arguments; ``around`` has to call the original exactly once and to guard its own work.
        ``label`` tells two hooks on one method apart.
        """
        original = owner.__dict__[method]
        name = f"lab.{owner.__name__}.{method}{label and ' ' + label}"
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

    def tail(self, what: str, key: str) -> None:
        """The tail of an order edge."""
        self.recorder.emit(Order(what, key, "tail"))

    def head(self, what: str, key: str) -> None:
        """The head of an order edge."""
        self.recorder.emit(Order(what, key, "head"))

    def restore(self) -> None:
        """Put every original back."""
        while self._wrapped:
            owner, method, original = self._wrapped.pop()
            setattr(owner, method, original)
