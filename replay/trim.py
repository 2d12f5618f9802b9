"""Trimming: a trace is cut down to a part whose verdict stays what it was.

What is left out is scope and is written down as such (the table ``trim``); the evidence for what stays is kept
(:mod:`replay.keep`). The written file is judged and compared with the verdict on the whole trace within the same
scope; where they differ, more is kept.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from capture_hooks.events import Loss, Trim
from capture_hooks.records import Stamp
from replay.judge import judge
from replay.judge_options import JudgeOptions
from replay.keep import ALL, REACH, RULES, Kept, keep
from replay.rooms import WITH_ROOM, NotInTraceError, check_request, rooms_of
from replay.scope import BESIDE, Scope
from replay.trace.errors import TraceError
from replay.trace.file import TRACE_SUFFIX
from replay.trace.hdf5 import check_name, give_name
from replay.trace.merge import Selection, copy
from replay.trace.reader import Trace, open_trace
from replay.trace.schema import TABLES
from replay.trace.writer import TraceWriter
from replay.verdict import STAGES, Verdict
from replay.writing import WriteError, writing

I64 = npt.NDArray[np.int64]
Progress = Callable[[str, int, int], None]

#: Stage of the loss records that tell what ``alone`` left out of the evidence.
STAGE = "trim"


@dataclass(frozen=True, slots=True)
class Trimmed:
    """What stayed.

    Attributes:
        rooms: rooms in scope.
        requests: requests of which there is anything, of ``known``: ``own`` in scope, and those that are evidence.
        records: records that stayed, of ``of``.
        level: how much had to be kept (:mod:`replay.keep`).
        lost: records that are evidence and were left out all the same (``alone``).
        verdict: of the part; None where it was not judged, because evidence was left out on purpose.
        beside: what differs in the whole trace at a stage that was cut away.
    """

    rooms: tuple[int, ...]
    requests: int
    own: int
    known: int
    records: int
    of: int
    level: int
    lost: int
    verdict: str | None
    beside: tuple[str, ...] = ()


def trim(
    paths: Sequence[Path],
    out: Path,
    scope: Scope,
    *,
    last: float | None = None,
    alone: bool = False,
    payload: bool = True,
    replace_out: bool = False,
    progress: Progress | None = None,
) -> Trimmed:
    """Write what a verdict on ``scope`` stands on into ``out``.

    Args:
        paths: traces, journals, folders.
        out: the file to write.
        scope: what to keep; ``TraceError`` if a part of it is not there.
        last: only requests with a record in the last so many seconds of their host. Times choose, they order nothing.
        alone: leave out the other requests, even where they are evidence; what is missing then is told as lost.
        payload: keep page bytes, keys, queries and logits.
        replace_out: replace an existing file.
        progress: called with what is being done.
    """
    with open_trace(*paths) as trace, _draft(out, replace_out) as draft:
        place = ", ".join(map(str, paths))
        _check(trace, scope, place)
        if last is not None:
            scope = scope.joined(Scope(rooms=_active(trace, last)))
        rooms = _rooms(trace, scope)
        if not rooms:
            raise TraceError("no request fits all that was asked for", place, "`replay info` counts them")
        checked = payload and not alone
        before = _judged(trace, scope, progress) if checked else None
        whole = keep(trace, scope, progress=progress) if alone else None
        for level in (RULES, REACH, ALL):
            kept = keep(trace, scope, level, alone=alone, progress=progress)
            lost = {} if whole is None else _lost(whole, kept)
            records = _write(trace, draft, scope, kept, lost, payload, last, progress)
            verdict = None
            if before is not None:
                with open_trace(draft) as written:
                    after = _judged(written, Scope(), progress)
                verdict = after.verdict
                if not _same(before, after) and level != ALL:
                    continue
            break
        total = sum(len(trace.table(name)) for name in TABLES)
        lost_records = sum(map(len, lost.values()))
        beside = tuple(item.what for item in before.not_judged if item.why == BESIDE) if before else ()
        counts = (kept.requests, kept.own, kept.known, records, total)
        return Trimmed(rooms, *counts, level, lost_records, verdict, beside)


@contextmanager
def _draft(out: Path, replace_out: bool) -> Iterator[Path]:
    """A name beside ``out`` for what is still to be judged; it becomes ``out`` where the block ends well."""
    check_name(out, replace_out)
    draft = out.with_name(f".{out.name}.{secrets.token_hex(6)}{TRACE_SUFFIX}")
    try:
        yield draft
        with writing(out):
            give_name(draft, out, replace_out)
    except WriteError as error:
        raise WriteError(out, error.what, error.todo) from error
    finally:
        draft.unlink(missing_ok=True)


def _judged(trace: Trace, scope: Scope, progress: Progress | None) -> Verdict:
    return judge(trace, JudgeOptions(reexecute=False, scope=scope), progress)


def _same(before: Verdict, after: Verdict) -> bool:
    """Whether trimming has changed nothing that it must not change."""
    # With stages cut away, what differs at one of them need not be seen any more, and clears or hides others.
    beside = any(item.why == BESIDE for item in before.not_judged)
    words = beside or (before.verdict == after.verdict and before.cleared == after.cleared)
    return words and _findings(before) == _findings(after)


def _findings(verdict: Verdict) -> list[tuple[Any, ...]]:
    found = [
        (f.code, f.stage, f.confidence, f.request, f.role, f.rank, f.buffer, f.layer, f.pages)
        for f in verdict.findings
    ]
    return sorted(found, key=repr)


def _rooms(trace: Trace, scope: Scope) -> tuple[int, ...]:
    known = rooms_of(trace)
    return tuple(known[scope.rooms_in(known)].tolist())


def _check(trace: Trace, scope: Scope, place: str) -> None:
    """Refuse rooms, layers and pages that the trace does not have: a typing error must not come out as *clean*."""
    for room in sorted(scope.rooms or ()):
        check_request(trace, room)
    logical = trace.table("snapshot").ragged("logical").values
    for noun, limit, known in (
        ("layer", scope.layers, trace.table("buffer")["layer"]),
        ("logical page", scope.logical, logical),
    ):
        lacking = sorted((limit or frozenset()) - set(np.unique(known).tolist()))
        if lacking:
            raise NotInTraceError(
                f"there is no {noun} {lacking[0]} in {place}; `replay info` says what there is"
            )


def _active(trace: Trace, seconds: float) -> frozenset[int]:
    """Rooms with a record in the last ``seconds`` of their host."""
    hosts = [process.host for process in trace.processes]
    end = dict.fromkeys(hosts, 0)
    for name in TABLES:
        table = trace.table(name)
        for number, host in enumerate(hosts):
            times = table["end_ns"][table["process"] == number]
            end[host] = max(end[host], int(times.max(initial=0)))
    since = np.array([end[host] - int(seconds * 1e9) for host in hosts], np.int64)
    found = [trace.table(name) for name in WITH_ROOM]
    rooms = [table["room"][table["end_ns"] >= since[table["process"]]] for table in found]
    return frozenset(room for room in np.unique(np.concatenate(rooms)).tolist() if room >= 0)


def _lost(whole: Kept, kept: Kept) -> dict[str, I64]:
    """Records of each table that are evidence and do not stay."""
    return {name: np.setdiff1d(rows, kept.rows[name]) for name, rows in whole.rows.items()}


def _write(
    trace: Trace,
    out: Path,
    scope: Scope,
    kept: Kept,
    lost: dict[str, I64],
    payload: bool,
    last: float | None,
    progress: Progress | None,
) -> int:
    selection = Selection(kept.rows, payload, kept.looks, kept.payload)
    with TraceWriter(out, replace=True) as writer:
        copy(trace, writer, progress, selection)
        seq = np.full(len(trace.processes), -1, np.int64)
        gone = np.zeros(len(trace.processes), np.int64)
        for name in TABLES:
            table = trace.table(name)
            np.maximum.at(seq, table["process"], table["seq"])
            left = np.setdiff1d(np.arange(len(table)), selection.of(table))
            gone += np.bincount(table["process"][left], minlength=len(gone))
        record = _record(scope, last, payload)
        for number in range(len(trace.processes)):
            seq[number] += 1
            at = int(seq[number])
            writer.add(number, Stamp(seq=at, begin_seq=at), replace(record, left_out=int(gone[number])))
        for name, rows in lost.items():
            table = trace.table(name)
            process = table["process"][rows]
            for number in np.unique(process).tolist():
                mine = table["seq"][rows][process == number]
                seq[number] += 1
                at, bounds = int(seq[number]), (int(mine.min()), int(mine.max()))
                loss = Loss(STAGE, name, len(mine), *bounds, "left out by replay trim --alone")
                writer.add(number, Stamp(seq=at, begin_seq=at), loss)
    return sum(len(selection.of(trace.table(name))) for name in TABLES)


def _record(scope: Scope, last: float | None, payload: bool) -> Trim:
    words = [f"{name} {value}" for name, value in scope.to_json().items()]
    if last is not None:
        words.append(f"active in the last {last:g} s")
    if not payload:
        words.append("without page bytes, keys, queries and logits")
    return Trim(
        run=secrets.token_hex(8),
        rooms=_numbers(scope.rooms),
        layers=_numbers(scope.layers),
        logical=_numbers(scope.logical),
        stages=",".join(stage for stage in STAGES if scope.stages and stage in scope.stages),
        choice="; ".join(words),
    )


def _numbers(limit: frozenset[int] | None) -> I64:
    return np.array(sorted(limit or ()), np.int64)
