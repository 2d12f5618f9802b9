"""Wrapping functions of SGLang, and finding out afterwards what was really wrapped.

A hook that is not called is worse than none: its silence looks like evidence. So :class:`Patches` resolves each
target where it is declared, puts the wrapper in every place that holds the original (the attribute itself, aliases
in the same class, ``from module import f`` copies), and then looks whether any other reference to the original is
left (in a partial, a dict, a closure, a bound method that was handed out). Such a hook is attached but not complete.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from capture_hooks.adapters.sglang.versions import Found, Target, lacking, resolve
from capture_hooks.recorder import Recorder
from capture_hooks.taps.methods import wrapped

Method = Callable[..., Any]

#: What hooks cover that a rung of the ladder needs; the silence of others (alarms, aborts) is as it should be.
RUNGS = ("store", "alloc", "send", "receive", "completion", "read", "top-k")


def hook_name(target: str) -> str:
    """Name of a hook in the trace."""
    return f"sglang.{target}"


@dataclass(slots=True)
class _Patched:
    """One hooked function. ``holders`` are (object, attribute, what was there)."""

    hook: str
    found: Found
    original: Method
    wrapper: Method
    holders: list[tuple[Any, str, Any]] = field(default_factory=list)
    replaced: bool = False


class Patches:
    """The wrapped functions of one process.

    ``targets`` are all declared targets, ``version`` the layout. ``covers`` of each hook goes into the trace through
    ``Recorder.hook``; every call is counted with ``Recorder.fired``.
    """

    def __init__(self, recorder: Recorder, targets: Iterable[Target], version: str, role: str) -> None:
        self.recorder = recorder
        self.version = version
        self.role = role
        self._targets = {target.name: target for target in targets}
        self._patched: list[_Patched] = []
        self._fired: dict[str, int] = {}
        self._covers: dict[str, str] = {}
        self._missing: dict[str, str] = {}

    # -- wrapping ------------------------------------------------------------------------------------------------

    def wrap(
        self,
        name: str,
        *,
        before: Method | None = None,
        after: Method | None = None,
        around: Method | None = None,
    ) -> bool:
        """Hook the declared target ``name``. Returns whether it is hooked.

        The bodies are those of :func:`capture_hooks.taps.methods.wrapped`.

        A target that this version does not have is no gap and is not told, nor is an optional one that is not there;
        one that should be there and is not is told as missing.
        """
        target = self._targets[name]
        if self.role not in target.roles:
            return False
        place = target.place(self.version)
        if place is None:
            return False
        hook, covers = hook_name(name), target.covers
        try:
            found = resolve(place)
            without = lacking(found, target.takes)
            if without:
                raise AttributeError(f"it takes no {', '.join(without)}")
        except Exception as error:
            if target.optional:
                return False
            self._missing[hook] = covers
            self.recorder.hook(
                hook, covers, "missing", False, f"{place}: {type(error).__name__}: {error}"[:200]
            )
            return False
        self._covers[hook] = covers
        self._fired[hook] = 0
        fired = functools.partial(self._count, hook)
        wrapper = wrapped(
            self.recorder, hook, found.function, before=before, after=after, around=around, fired=fired
        )
        self._put(hook, found, wrapper)
        self.recorder.hook(hook, covers)
        return True

    def own(self, name: str, covers: str) -> Callable[[], None]:
        """A hook that wraps nothing: what several others find out together. Call what is returned each time."""
        hook = hook_name(name)
        self._covers[hook], self._fired[hook] = covers, 0
        self.recorder.hook(hook, covers)

        def fire() -> None:
            self.recorder.fired(hook)
            self._count(hook)

        return fire

    def _count(self, hook: str) -> None:
        self._fired[hook] += 1  # a lost count does no harm: only "fired at all" is told from it

    def _put(self, hook: str, found: Found, wrapper: Method) -> None:
        original = found.function
        patched = _Patched(hook, found, original, wrapper)
        value: Any = wrapper
        if isinstance(found.raw, staticmethod):
            value = staticmethod(wrapper)
        elif isinstance(found.raw, classmethod):
            value = classmethod(wrapper)
        self._set(patched, found.owner, found.attribute, value)
        if isinstance(found.owner, type):
            for name, held in list(vars(found.owner).items()):  # aliases: ``second_name = first_name``
                if held is found.raw:
                    self._set(patched, found.owner, name, value)
        else:
            for module in _modules():
                for name, held in list(vars(module).items()):  # ``from module import f`` elsewhere
                    if held is original:
                        self._set(patched, module, name, wrapper)
        self._patched.append(patched)

    @staticmethod
    def _set(patched: _Patched, holder: Any, name: str, value: Any) -> None:
        before = vars(holder)[name]
        setattr(holder, name, value)
        patched.holders.append((holder, name, before))

    # -- what was really patched ---------------------------------------------------------------------------------

    def verify(self) -> None:
        """Look at every hooked function again, and tell hooks that can be passed by as not complete."""
        strays = self._strays()
        for patched in self._patched:
            why = strays.get(id(patched.original))
            if why is not None:
                self.recorder.incomplete(patched.hook, why)
        self.look_again()

    def look_again(self) -> None:
        """Tell hooks whose function somebody has replaced since as not complete. Cheap enough for a running server."""
        for patched in self._patched:
            now = vars(patched.found.owner).get(patched.found.attribute)
            now = now.__func__ if isinstance(now, (staticmethod, classmethod)) else now
            if not patched.replaced and not _leads_to(now, patched.wrapper):
                patched.replaced = True
                why = "the function was replaced after it was hooked"
                self.recorder.incomplete(patched.hook, why)

    def _strays(self) -> dict[int, str]:
        """Original function -> who else still holds it (one pass over all objects)."""
        found: dict[int, str] = {}
        functions = [p.original for p in self._patched]
        for referrer in gc.get_referrers(*functions):
            if referrer is functions or isinstance(referrer, (_Patched, Found, types.FrameType)):
                continue
            for original in functions:
                if _is_own_table(referrer, original, self._patched):
                    continue
                who = _who_holds(referrer, original)
                if who:
                    found.setdefault(
                        id(original), f"it can be called past the hook: {who} holds the original"
                    )
        return found

    def restore(self) -> None:
        """Put every original back where the wrapper still is."""
        while self._patched:
            patched = self._patched.pop()
            for holder, name, before in reversed(patched.holders):
                now = vars(holder).get(name)
                now = now.__func__ if isinstance(now, (staticmethod, classmethod)) else now
                if now is not patched.wrapper:
                    continue
                setattr(holder, name, before)

    def summary(self) -> str:
        """``attached 31 of 31 hooks, 24 fired; not covered: ...`` for people."""
        attached, fired = len(self._covers), sum(count > 0 for count in self._fired.values())
        total = attached + len(self._missing)
        covered = {self._covers[name] for name, count in self._fired.items() if count}
        silent = sorted((set(self._covers.values()) - covered) & set(RUNGS))
        line = f"attached {attached} of {total} hooks, {fired} fired"
        gaps = [f"{name} is missing" for name in sorted(self._missing)]
        if fired:
            gaps += [f"{what} (its hooks never fired)" for what in silent]
        return f"{line}; not covered: {', '.join(gaps)}" if gaps else line

    @property
    def fired(self) -> dict[str, int]:
        """Hook -> calls so far."""
        return dict(self._fired)


def _is_own_table(referrer: Any, original: Method, patched: list[_Patched]) -> bool:
    """Whether ``referrer`` is a table of a library that is not SGLang's, which has its own function under its
    own name.

    A compiled library hands its functions out of one; SGLang takes them from the module's attribute, which is
    hooked.
    """
    if not isinstance(referrer, dict):
        return False
    for one in patched:
        owner = one.found.owner
        if one.original is original and isinstance(owner, types.ModuleType):
            name = one.found.attribute
            names = [key for key, held in list(referrer.items()) if held is original]
            own = all(str(key).rpartition(".")[2] == name for key in names)
            return bool(names) and own and not owner.__name__.startswith("sglang")
    return False


def _modules() -> list[types.ModuleType]:
    return [module for module in list(sys.modules.values()) if isinstance(module, types.ModuleType)]


def _leads_to(function: Any, wrapper: Method) -> bool:
    """Whether ``function`` is ``wrapper`` or wraps it (another plug-in may have wrapped ours in turn)."""
    for _ in range(20):
        if function is wrapper:
            return True
        function = getattr(function, "__wrapped__", None)
        if function is None:
            return False
    return False


def _who_holds(referrer: Any, original: Method) -> str:
    """In words, how ``referrer`` lets somebody call ``original`` past the hook; "" if it does not."""
    if isinstance(referrer, functools.partial) and referrer.func is original:
        return "a partial"
    if isinstance(referrer, types.MethodType) and referrer.__func__ is original:
        return f"a bound method of {type(referrer.__self__).__name__}"
    if isinstance(referrer, dict):
        for key, value in list(referrer.items()):
            if value is original and key != "__wrapped__":
                return f"a table under {str(key)[:60]!r}"
    return ""
