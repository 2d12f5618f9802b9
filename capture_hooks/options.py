"""Every ``KV_REPLAY_*`` option, declared once.

The parser, the documentation table, ``replay env`` and the trace header all read :data:`OPTIONS`. A value that
does not parse never stops the server: the default is used and a warning says so.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

PREFIX = "KV_REPLAY_"
MODES = ("digest", "pages", "full")

#: The taps that take snapshots and device data: ST; SE; RC and LT; RD with query, weights, logits and top-k.
TAPS = ("store", "send", "receive", "read")

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)(B?)\s*", re.IGNORECASE)
_MAX_SIZE = 2**62


def parse_size(text: str) -> int:
    """Bytes from ``4GB`` (powers of 1000), ``4GiB`` or ``4G`` (powers of 1024), or a plain number.

    Raises ``ValueError`` for anything else.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError("expected a size such as 4GB, 512MiB or 1048576")
    number, unit, binary, byte = match.groups()
    if binary and not unit:
        raise ValueError("expected a size such as 4GB, 512MiB or 1048576")
    factor = _UNITS[unit.upper()]
    if unit and byte and not binary:
        factor = 1000 ** ("KMGT".index(unit.upper()) + 1)
    size = int(float(number) * factor) if "." in number else int(number) * factor
    if not 0 < size <= _MAX_SIZE:
        raise ValueError(f"expected a size between 1 byte and {_MAX_SIZE} bytes")
    return size


def _folder(text: str) -> Path | None:
    return Path(text) if text.strip() else None


def _mode(text: str) -> str:
    mode = text.strip().lower()
    if mode not in MODES:
        raise ValueError(f"expected one of {', '.join(MODES)}")
    return mode


def _number(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and 0 <= value <= 1e9):
        raise ValueError(f"expected {_EXPECTED['seconds']}")
    return value


def _count(text: str) -> int:
    value = int(text)
    if not 0 < value <= 2**40:
        raise ValueError(f"expected {_EXPECTED['count']}")
    return value


def _flag(text: str) -> bool:
    value = text.strip().lower()
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("0", "false", "no", "off", ""):
        return False
    raise ValueError("expected 1 or 0")


def _taps(text: str) -> tuple[str, ...]:
    names = tuple(name.strip().lower() for name in text.split(",") if name.strip())
    if names in ((), ("all",)):
        return TAPS
    if names == ("none",):
        return ()
    wrong = [name for name in names if name not in TAPS]
    if wrong:
        raise ValueError(f"unknown tap {wrong[0]!r}; expected all, none or a list of {', '.join(TAPS)}")
    return tuple(name for name in TAPS if name in names)


_PARSERS: dict[str, Callable[[str], Any]] = {
    "folder": _folder,
    "mode": _mode,
    "seconds": _number,
    "size": parse_size,
    "count": _count,
    "flag": _flag,
    "taps": _taps,
}


#: What is told about text that no parser understands.
_EXPECTED = {"seconds": "a number of seconds from 0 on", "count": "a whole number from 1 on"}


@dataclass(frozen=True, slots=True)
class Option:
    """One option: its name in :class:`Options`, its variable, its type, its default and what it does.

    ``type`` is one of "folder", "mode", "seconds", "size" (bytes), "count", "flag", "taps".
    """

    name: str
    env: str
    type: str
    default: Any
    help: str

    def parse(self, text: str) -> Any:
        """The value of ``text``; ``ValueError`` says what is expected."""
        try:
            return _PARSERS[self.type](text)
        except (ValueError, OverflowError) as error:
            if str(error).startswith(("expected", "unknown tap")):
                raise ValueError(str(error)) from None
            raise ValueError(f"expected {_EXPECTED[self.type]}") from None

    def show(self, value: Any) -> str:
        """``value`` as it would be written in the environment."""
        if value is None:
            return ""
        if isinstance(value, bool):
            return "1" if value else "0"
        if isinstance(value, tuple):
            return "all" if value == TAPS else ",".join(value) or "none"
        return f"{value:g}" if isinstance(value, float) else str(value)


def _option(type_: str, help_: str) -> dict[str, str]:
    return {"type": type_, "help": help_}


@dataclass(frozen=True, slots=True)
class Options:
    """The effective options of one process. The variable of field ``x`` is ``KV_REPLAY_X``."""

    capture: Path | None = field(
        default=None,
        metadata=_option("folder", "folder for the journals; turns capture on. Unset: nothing is hooked"),
    )
    mode: str = field(
        default="pages",
        metadata=_option(
            "mode",
            "what is kept: digest (digests, descriptors, tables, order; never bytes), pages (and a ring of "
            "page bytes, written out on a trigger) or full (every page content)",
        ),
    )
    taps: tuple[str, ...] = field(
        default=TAPS,
        metadata=_option(
            "taps",
            "which taps run: all, none, or a list of store, send, receive, read. 'read' alone leaves the "
            "overlap of store and read as it is without capture",
        ),
    )
    ring_seconds: float = field(
        default=30.0, metadata=_option("seconds", "how far back the ring of page bytes reaches (mode pages)")
    )
    after_seconds: float = field(
        default=5.0, metadata=_option("seconds", "how long page bytes are written on after a trigger")
    )
    disk_limit: int = field(
        default=8 * 10**9,
        metadata=_option(
            "size", "bytes one process may write; near it bytes are given up first, then all but counters"
        ),
    )
    host_limit: int = field(
        default=2**30, metadata=_option("size", "host memory for the ring (3/4) and the queue (1/4)")
    )
    queue: int = field(
        default=65_536,
        metadata=_option("count", "records that may wait for the writer; more are dropped and counted"),
    )
    flush_ms: int = field(
        default=200,
        metadata=_option("count", "a record is handed to the kernel at the latest after this time"),
    )
    flush_bytes: int = field(
        default=2**20, metadata=_option("size", "and as soon as this many bytes have gathered")
    )
    read_every: int = field(
        default=64,
        metadata=_option(
            "count", "a request's first read and every Nth step after it are recorded with bytes"
        ),
    )
    store_every: int = field(
        default=8,
        metadata=_option("count", "store inputs are kept of every Nth request (mode pages; full keeps all)"),
    )
    later_ms: int = field(
        default=20, metadata=_option("count", "how long after its arrival a page is looked at again (LT)")
    )
    hook_errors: int = field(
        default=5, metadata=_option("count", "a hook that failed this often is detached")
    )
    seal: bool = field(
        default=True,
        metadata=_option("flag", "seal the journal to .h5 in a child when the process ends normally"),
    )

    #: Fields that must not reach a trace: a trace holds no paths.
    PRIVATE: ClassVar[tuple[str, ...]] = ("capture",)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> tuple[Options, list[str]]:
        """Options from environment variables, and warnings for unknown names and bad values."""
        values: dict[str, Any] = {}
        warnings: list[str] = []
        for env in sorted(name for name in environ if name.startswith(PREFIX)):
            option = BY_ENV.get(env)
            if option is None:
                nearest = difflib.get_close_matches(env, BY_ENV, n=1, cutoff=0.0)[0]
                warnings.append(f"unknown option {env} is ignored; did you mean {nearest}?")
                continue
            try:
                values[option.name] = option.parse(environ[env])
            except ValueError as error:
                default = option.show(option.default) or "unset"
                warnings.append(f"{env}={environ[env]!r}: {error}; using {default}")
        return cls(**values), warnings

    def tap(self, name: str) -> bool:
        """Whether the tap ``name`` (one of :data:`TAPS`) runs."""
        return name in self.taps

    def public(self) -> dict[str, Any]:
        """The options as plain JSON types for the trace header, without those that hold paths."""
        found: dict[str, Any] = {}
        for option in OPTIONS:
            if option.name not in self.PRIVATE:
                value = getattr(self, option.name)
                found[option.name] = list(value) if isinstance(value, tuple) else value
        return found


OPTIONS: tuple[Option, ...] = tuple(
    Option(item.name, PREFIX + item.name.upper(), item.metadata["type"], item.default, item.metadata["help"])
    for item in fields(Options)
)
BY_ENV: dict[str, Option] = {option.env: option for option in OPTIONS}
