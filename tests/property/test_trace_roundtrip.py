"""Whatever is recorded is what is read: through the builder, through a journal, and through a merge."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_hooks.events import EVENTS, Content, Process, Snapshot
from capture_hooks.journal import JournalWriter
from capture_hooks.options import Options
from capture_hooks.records import Event, Stamp, schema
from replay.trace.builder import TraceBuilder
from replay.trace.merge import merge
from replay.trace.reader import Trace, open_trace
from replay.trace.seal import seal
from replay.trace.verify import verify

KINDS = [event for event in EVENTS if event not in (Process, Content)]
INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SCALARS = {
    "int": INT64,
    "float": st.floats(allow_nan=False),
    "bool": st.booleans(),
    "str": TEXT,
}


def arrays(dtype: str, shape: tuple[int | None, ...]) -> st.SearchStrategy[np.ndarray]:
    def make(length: int, seed: int) -> np.ndarray:
        dims = [length, *(3 if n is None else n for n in shape[1:])]
        return (
            np.random.default_rng(seed)
            .integers(0, 256, (*dims, np.dtype(dtype).itemsize), np.uint8)
            .view(dtype)[..., 0]
        )

    return st.builds(make, st.integers(0, 4), st.integers(0, 5))


@st.composite
def records(draw: st.DrawFn) -> tuple[type[Event], dict[str, Any]]:
    event = draw(st.sampled_from(KINDS))
    fields: dict[str, Any] = {}
    for item in schema(event):
        if event is Snapshot and item.name in (
            "logical",
            "pages",
            "digests",
            "row_values",
            "row_scales",
            "data",
        ):
            continue
        if item.array is None:
            fields[item.name] = draw(SCALARS[item.type])
        else:
            found = draw(arrays(item.array.dtype, item.array.shape))
            fields[item.name] = np.nan_to_num(found) if found.dtype.kind == "f" else found
    if event.TABLE == "buffer":
        fields["format"] = draw(st.sampled_from(["fp8", "bf16", "fp4"]))
    if event is Snapshot:
        fields.update(_page_fields(draw))
    return event, fields


def _page_fields(draw: st.DrawFn) -> dict[str, Any]:
    """Pages out of few contents, told by digest, with rows, or with bytes; content k is always the same."""
    which = np.array(draw(st.lists(st.integers(0, 5), max_size=6)), np.int64)
    rng = np.random.default_rng(99)
    digests = rng.integers(0, 2**63, (6, 2)).astype(np.uint64)
    rows = rng.integers(0, 2**63, (6, 3)).astype(np.uint64)
    scales = rng.integers(0, 2**31, (6, 3)).astype(np.uint32)
    data = rng.integers(0, 256, (6, 24)).astype(np.uint8)
    fields: dict[str, Any] = {
        "pages": which + 100,
        "logical": np.arange(len(which)),
        "digests": digests[which],
    }
    if draw(st.booleans()):
        fields.update(row_values=rows[which], row_scales=scales[which])
    if draw(st.booleans()):
        fields["data"] = data[which]
    return fields


HISTORY = st.lists(st.tuples(records(), st.integers(0, 2**62), st.integers(0, 3)), max_size=12)


def check(trace: Trace, process: int, history: list[Any]) -> None:
    """Every record of ``history`` is in ``trace``, in order, with every field."""
    by_table: dict[str, list[dict[str, Any]]] = {}
    for (event, fields), begin_ns, thread in history:
        by_table.setdefault(event.TABLE, []).append({**fields, "begin_ns": begin_ns, "thread": thread})
    for event in KINDS:
        table = trace.table(event.TABLE)
        mine = np.flatnonzero(table["process"] == process)
        wanted = by_table.get(event.TABLE, [])
        assert len(mine) == len(wanted)
        for row, fields in zip(mine.tolist(), wanted, strict=True):
            for name, value in fields.items():
                if event is Snapshot and name in ("digests", "row_values", "row_scales", "data"):
                    continue
                _check_field(table, name, row, value)
            if event is Snapshot:
                _check_contents(trace, row, fields)


def _check_field(table: Any, name: str, row: int, value: Any) -> None:
    if not isinstance(value, np.ndarray):
        assert table[name][row] == value, name
    elif name in table._columns and table._columns[name].kind == "bulk":
        np.testing.assert_array_equal(table.bulk(name, row), value if value.size else value[:0])
    else:
        np.testing.assert_array_equal(table.ragged(name)[row], value)


def _check_contents(trace: Trace, row: int, fields: dict[str, Any]) -> None:
    ids = trace.table("snapshot").ragged("content")[row]
    contents = trace.contents
    np.testing.assert_array_equal(contents.digests[ids], fields["digests"])
    if len(ids) and "row_values" in fields:
        np.testing.assert_array_equal(contents.row_values(ids), fields["row_values"])
        np.testing.assert_array_equal(contents.row_scales(ids), fields["row_scales"])
    if len(ids) and "data" in fields:
        np.testing.assert_array_equal(contents.data(ids), fields["data"])


def build(path: Path, histories: list[list[Any]], roles: tuple[str, ...]) -> Path:
    with TraceBuilder(path) as builder:
        for role, history in zip(roles, histories, strict=True):
            process = builder.process(role=role, run=f"run {role}")
            for (event, fields), begin_ns, thread in history:
                if event is Snapshot and "data" in fields:
                    process._page_bytes.clear()  # pages of 24 bytes belong to no format
                getattr(process, event.TABLE)(**fields, begin_ns=begin_ns, thread=thread)
    return path


@settings(max_examples=40)
@given(history=HISTORY)
def test_what_is_built_is_what_is_read(history: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = build(Path(folder) / "t.h5", [history], ("prefill",))
        with open_trace(path) as trace:
            check(trace, 0, history)


@settings(max_examples=25)
@given(history=HISTORY, split=st.integers(0, 12))
def test_what_is_written_to_a_journal_is_what_is_read(history: list[Any], split: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prefill-0-aa.journal"
        log = JournalWriter(path, Process(role="prefill", run="aa"), Options())
        for seq, ((event, fields), begin_ns, thread) in enumerate(history):
            log.write(event(**fields), Stamp(seq=seq, thread=thread, begin_ns=begin_ns))
            if seq == split:
                log.flush()
        log.close()
        seal([path], Path(folder) / "out.h5")
        with open_trace(Path(folder) / "out.h5") as trace:
            # Clock and loss records of the journal itself are not in the history.
            own = [item for item in history if item[0][0].TABLE not in ("clock", "loss", "hook")]
            for event in KINDS:
                if event.TABLE not in ("clock", "loss", "hook"):
                    wanted = [item for item in own if item[0][0] is event]
                    assert len(trace.table(event.TABLE)) == len(wanted)
                    for row, ((_, fields), _, _) in enumerate(wanted):
                        for name, value in fields.items():
                            if not (
                                event is Snapshot and name in ("digests", "row_values", "row_scales", "data")
                            ):
                                _check_field(trace.table(event.TABLE), name, row, value)
                        if event is Snapshot:
                            _check_contents(trace, row, fields)


@settings(max_examples=15)
@given(histories=st.tuples(HISTORY, HISTORY, HISTORY), order=st.permutations([0, 1, 2]))
def test_a_merge_loses_nothing_and_does_not_depend_on_the_order(
    histories: tuple[list[Any], ...], order: list[int]
) -> None:
    roles = ("prefill", "decode", "server")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = [build(folder / f"{n}.h5", [histories[n]], (roles[n],)) for n in range(3)]
        merge([paths[n] for n in order], folder / "merged.h5")
        with open_trace(*paths) as apart, open_trace(folder / "merged.h5") as merged:
            assert [process.role for process in merged.processes] == list(roles)
            for trace in (apart, merged):
                for number, history in enumerate(histories):
                    check(trace, number, history)
                # The same pages of all three files are the same contents.
                assert len({digest.tobytes() for digest in trace.contents.digests}) == len(trace.contents)
            assert len(apart.contents) == len(merged.contents)
        assert not [
            problem for problem in verify(folder / "merged.h5").problems if "digest" not in problem.what
        ]
