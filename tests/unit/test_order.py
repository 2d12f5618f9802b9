"""Happens-before: what orders records, and what does not."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from replay.order import HappensBefore, Moment, moment
from replay.trace.builder import ProcessBuilder, TraceBuilder
from replay.trace.reader import Trace, open_trace


def mark(process: ProcessBuilder, name: str, thread: int = 0) -> None:
    process.trigger(reason=name, thread=thread)


def at(trace: Trace, name: str) -> Moment:
    table = trace.table("trigger")
    return moment(table, list(table["reason"]).index(name))


def before(path: Path, first: str, second: str) -> bool:
    with open_trace(path) as trace:
        order = HappensBefore(trace)
        return order.before(at(trace, first), at(trace, second))


def test_one_thread_is_in_sequence_and_two_threads_are_not(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    with TraceBuilder(path) as builder:
        p = builder.process(role="prefill")
        mark(p, "a")
        mark(p, "b")
        mark(p, "other", thread=1)
    assert before(path, "a", "b")
    assert not before(path, "b", "a")
    assert not before(path, "a", "other")
    assert not before(path, "other", "a")


def test_an_edge_orders_what_came_before_its_tail_and_after_its_head(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    with TraceBuilder(path) as builder:
        p, d = builder.process(role="prefill"), builder.process(role="decode")
        mark(p, "sent")
        mark(d, "early")
        builder.edge(p, d, what="status")
        mark(p, "later")
        mark(d, "seen")
        mark(d, "unrelated", thread=3)
    assert before(path, "sent", "seen")
    assert not before(path, "later", "seen")
    assert not before(path, "sent", "early")
    assert not before(path, "sent", "unrelated")
    assert not before(path, "seen", "sent")


def test_edges_chain_through_threads_and_processes(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    with TraceBuilder(path) as builder:
        p, d = builder.process(role="prefill"), builder.process(role="decode")
        mark(p, "store", thread=1)
        builder.edge(p, p, what="queue", before_thread=1, after_thread=2)
        builder.edge(p, d, what="status", before_thread=2, after_thread=5)
        builder.edge(d, d, what="queue", before_thread=5, after_thread=0)
        mark(d, "read")
    assert before(path, "store", "read")


def test_an_interval_that_began_before_the_edge_is_not_ordered_after_it(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    with TraceBuilder(path) as builder:
        p, d = builder.process(role="prefill"), builder.process(role="decode")
        mark(p, "sent")
        began = d.next_seq
        builder.edge(p, d, what="status")
        d.trigger(reason="long", begin_seq=began)
    assert not before(path, "sent", "long")


def test_work_of_one_stream_is_ordered_and_a_host_thread_is_not_without_a_sync(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    with TraceBuilder(path) as builder:
        p = builder.process(role="prefill")
        p.trigger(reason="first", stream=7)
        p.trigger(reason="second", stream=7)
        mark(p, "host")
    assert before(path, "first", "second")
    assert not before(path, "second", "host")


def test_a_cycle_orders_nothing_and_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    with TraceBuilder(path) as builder:
        p, d = builder.process(role="prefill"), builder.process(role="decode")
        p.order(what="status", key="1", end="head")
        p.order(what="abort", key="1", end="tail")
        d.order(what="abort", key="1", end="head")
        d.order(what="status", key="1", end="tail")
        mark(p, "p")
        mark(d, "d")
    with open_trace(path) as trace:
        order = HappensBefore(trace)
        assert order.edges == 0
        assert order.dropped >= 2
        assert not order.ordered(at(trace, "p"), at(trace, "d"))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("mark"), st.integers(0, 2), st.integers(0, 1), st.just(0), st.just(0)),
            st.tuples(
                st.just("edge"), st.integers(0, 2), st.integers(0, 1), st.integers(0, 2), st.integers(0, 1)
            ),
        ),
        max_size=14,
    )
)
def test_before_is_reachability_in_the_graph_of_threads_and_edges(
    tmp_path_factory: object, steps: list[tuple[str, int, int, int, int]]
) -> None:
    """Against a plain search over the same graph; time runs forward, so there is no cycle."""
    path = tmp_path_factory.mktemp("order") / "t.h5"  # type: ignore[attr-defined]
    last: dict[tuple[int, int], int] = {}
    parents: list[set[int]] = []
    marks: list[int] = []

    def node(line: tuple[int, int], also: set[int] = frozenset()) -> int:  # type: ignore[assignment]
        parents.append(({last[line]} if line in last else set()) | set(also))
        last[line] = len(parents) - 1
        return last[line]

    with TraceBuilder(path) as builder:
        processes = [builder.process(role="server", rank=rank) for rank in range(3)]
        for kind, p, thread, q, other in steps:
            if kind == "mark":
                marks.append(node((p, thread)))
                mark(processes[p], str(len(marks) - 1), thread)
            elif (p, thread) != (q, other):
                tail = node((p, thread))
                node((q, other), {tail})
                builder.edge(processes[p], processes[q], before_thread=thread, after_thread=other)
    above: list[set[int]] = []
    for direct in parents:
        above.append(set(direct).union(*(above[parent] for parent in direct)) if direct else set())
    with open_trace(path) as trace:
        order = HappensBefore(trace)
        moments = [at(trace, str(number)) for number in range(len(marks))]
        for i, first in enumerate(moments):
            for j, second in enumerate(moments):
                assert order.before(first, second) == (marks[i] in above[marks[j]])
