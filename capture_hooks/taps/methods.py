"""Functions of an engine replaced by wrappers that record, and put back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from capture_hooks.recorder import Recorder

Function = Callable[..., Any]


def wrapped(
    recorder: Recorder,
    hook: str,
    original: Function,
    *,
    before: Function | None = None,
    after: Function | None = None,
    around: Function | None = None,
    fired: Callable[[], object] = lambda: None,
    off: Callable[[], bool] = lambda: False,
) -> Function:
    """``original`` with the bodies of one hook: what every hooked function of every engine is replaced by.

    ``before`` gets the call's arguments, ``after`` the result and the arguments; what they return is ignored, and what
    they raise is counted under ``hook`` and swallowed. ``around`` gets the original and the arguments; it has to call
    the original exactly once, return its result, and guard its own work (``Recorder.guard``). Where the recorder is
    closed, the hook has failed too often or ``off()`` is true, the original is called and nothing else. ``fired`` is
    called with each call that is not passed through.
    """
    guard = recorder.guard(hook)

    @functools.wraps(original)
    def wrapper(*args: Any, **keywords: Any) -> Any:
        if recorder.closed or recorder.detached(hook) or off():
            return original(*args, **keywords)
        recorder.fired(hook)
        fired()
        if around is not None:
            return around(original, *args, **keywords)
        if before is not None:
            with guard:
                before(*args, **keywords)
        result = original(*args, **keywords)
        if after is not None:
            with guard:
                after(result, *args, **keywords)
        return result

    return wrapper


class Hooks:
    """The wrapped methods of one process. Hooks are called ``<engine>.<class>.<method>`` in the trace.

    What a hook raises is counted and never reaches the engine; one that fails too often is detached.
    """

    def __init__(self, recorder: Recorder, engine: str) -> None:
        self.recorder = recorder
        self._engine = engine
        self._wrapped: list[tuple[type[Any], str, Function]] = []

    def wrap(
        self,
        owner: type[Any],
        method: str,
        covers: str,
        *,
        before: Function | None = None,
        after: Function | None = None,
        around: Function | None = None,
        label: str = "",
    ) -> None:
        """Hook ``owner.method``, which the class ``owner`` itself must define (``KeyError`` where it does not).

        The bodies are those of :func:`wrapped`. ``covers`` is what of ``events.Hook`` the method lets the hook see, all
        of it; ``label`` tells two hooks on one method apart.
        """
        original = owner.__dict__[method]
        name = f"{self._engine}.{owner.__name__}.{method}{label and ' ' + label}"
        wrapper = wrapped(self.recorder, name, original, before=before, after=after, around=around)
        setattr(owner, method, wrapper)
        self._wrapped.append((owner, method, original))
        self.recorder.hook(name, covers)

    def restore(self) -> None:
        """Put every original back."""
        while self._wrapped:
            owner, method, original = self._wrapped.pop()
            setattr(owner, method, original)
