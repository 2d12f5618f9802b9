"""Hook targets as data, and which layout of SGLang's code is installed.

A target names one function for every version that has it. A version that is not listed is probed: where every target
of a known layout (the newest first) is there and takes the arguments that its hook needs, it is treated as that layout;
anything else is refused with a sentence, and the server goes on without capture.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Any

#: Known layouts, newest first.
VERSIONS = ("0.5.23", "0.5.16")
ROLES = ("prefill", "decode", "server")

#: Modules below ``sglang.srt`` in which both sides of a transfer have functions that are hooked.
COMMON, NIXL, MOONCAKE = (f"disaggregation.{name}.conn" for name in ("common", "nixl", "mooncake"))

#: Argument of a server whose model is run by another plug-in, past every function of SGLang's own.
REPLACED = "enable_nvidia_megakernel"

#: In ``Target.where``: the same place in every version.
EVERYWHERE = "*"


@dataclass(frozen=True, slots=True)
class Target:
    """One function that is hooked.

    ``name`` is unique among all targets; the hook is called ``sglang.<name>`` in traces. ``covers`` is what its hook
    sees (``events.Hook.covers``). ``where`` maps a version, or :data:`EVERYWHERE`, to ``"module:qualified.name"``; a
    version without an entry has no such function. ``takes`` are parameter names that the hook relies on.
    ``optional`` targets belong to software that need not be installed (another transfer library, a kernel package):
    where it is not, that is no gap and is not told.
    """

    name: str
    covers: str
    where: Mapping[str, str]
    roles: tuple[str, ...] = ROLES
    takes: tuple[str, ...] = ()
    optional: bool = False

    def place(self, version: str) -> str | None:
        """``"module:qualified.name"`` in a known version, ``None`` where it has none."""
        return self.where.get(version, self.where.get(EVERYWHERE))


def at(module: str, qualname: str) -> dict[str, str]:
    """``Target.where`` of a function that every version has in one place (below ``sglang.srt``)."""
    return {EVERYWHERE: f"sglang.srt.{module}:{qualname}"}


def only(version: str, module: str, qualname: str) -> dict[str, str]:
    """``Target.where`` of a function that one version has."""
    return {version: f"sglang.srt.{module}:{qualname}"}


@dataclass(frozen=True, slots=True)
class Found:
    """A resolved target: the object that holds the function, its attribute, and the raw attribute value.

    ``raw`` may be a ``staticmethod`` or ``classmethod`` object.
    """

    owner: ModuleType | type[Any]
    attribute: str
    raw: Any

    @property
    def function(self) -> Any:
        """The plain function."""
        return self.raw.__func__ if isinstance(self.raw, (staticmethod, classmethod)) else self.raw


def resolve(place: str) -> Found:
    """Import and find ``"module:qualified.name"``.

    What a class only inherits is not found: a function that was renamed would be taken for its base's of that name,
    which other classes may have replaced. Raises ``ImportError`` or ``AttributeError`` that says what is missing.
    """
    module_name, _, qualname = place.partition(":")
    owner: Any = importlib.import_module(module_name)
    *path, attribute = qualname.split(".")
    for part in path:
        owner = getattr(owner, part)
    if attribute not in vars(owner):
        raise AttributeError(f"{place} is not there")
    found = Found(owner, attribute, vars(owner)[attribute])
    if not callable(found.function):
        raise AttributeError(f"{place} is not a function")
    return found


def lacking(found: Found, takes: Iterable[str]) -> list[str]:
    """Names in ``takes`` that the function has no parameter for."""
    try:
        parameters = inspect.signature(found.function).parameters.values()
    except (TypeError, ValueError):
        return []
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return []
    names = {p.name for p in parameters}
    return [name for name in takes if name not in names]


def problem(target: Target, version: str) -> str:
    """Why ``target`` cannot be hooked as the layout ``version`` says; "" if it can (or that layout
    has no such function).
    """
    place = target.place(version)
    if place is None:
        return ""
    try:
        found = resolve(place)
    except ImportError as error:
        return f"{target.name}: {error}"
    except AttributeError:
        return f"{target.name}: {place} is not there"
    without = lacking(found, target.takes)
    return f"{target.name}: {place} takes no {', '.join(without)}" if without else ""


@dataclass(frozen=True, slots=True)
class Layout:
    """What was found installed: ``installed`` version, the known layout it is treated as ("" = refused), and why."""

    installed: str
    version: str
    note: str = ""


def installed_version() -> str:
    """Version of the installed SGLang, "" if there is none."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        pass
    try:
        module: Any = importlib.import_module("sglang.version")
    except ImportError:
        return ""
    return str(getattr(module, "__version__", ""))


def probe(targets: Iterable[Target], installed: str | None = None) -> Layout:
    """Which known layout the installed SGLang has.

    A known version is believed (each target is checked again when it is hooked). Local and post releases of a known
    version count as it.
    """
    version = installed_version() if installed is None else installed
    base = version.split("+")[0].split(".post")[0]
    if base in VERSIONS:
        return Layout(version, base)
    wanted = [target for target in targets if not target.optional]
    for known in VERSIONS:
        problems = tuple(filter(None, (problem(target, known) for target in wanted)))
        if not problems:
            return Layout(
                version, known, f"SGLang {version or '?'} is not known; its code has the layout of {known}"
            )
        if known == VERSIONS[0]:
            first = problems
    return Layout(
        version,
        "",
        f"SGLang {version or '?'} is not known and its code has another layout than {' or '.join(VERSIONS)} "
        f"({len(first)} of {len(wanted)} functions differ, first {first[0]}); nothing is recorded",
    )
