from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from replay.page_columns import EventColumn, by_event, column_at
from replay.trace.builder import TraceBuilder
from replay.trace.reader import Ragged, open_trace

EVENT = np.array([0, 0, 2, 1])
VALUES = np.array([10, 11, 12])


def test_an_event_column_is_the_array_that_it_stands_for() -> None:
    column, plain = by_event(VALUES, EVENT), VALUES[EVENT]
    assert len(column) == 4
    assert column[2] == 12
    np.testing.assert_array_equal(column[np.array([3, 0])], plain[[3, 0]])
    np.testing.assert_array_equal(np.asarray(column), plain)
    np.testing.assert_array_equal(column * 2 + 1, plain * 2 + 1)
    np.testing.assert_array_equal(column >= 11, plain >= 11)
    np.testing.assert_array_equal(np.where(column > 10, column, -1), np.where(plain > 10, plain, -1))
    np.testing.assert_array_equal(np.arange(20)[column], plain)
    np.testing.assert_array_equal(np.lexsort((column, plain)), np.lexsort((plain, plain)))


def test_an_event_column_refuses_to_be_a_view() -> None:
    with pytest.raises(ValueError, match="when it is asked for"):
        EventColumn(VALUES, EVENT).__array__(copy=False)


def test_a_column_at_no_row_is_minus_one() -> None:
    assert column_at(VALUES, np.array([2, -1])).tolist() == [12, -1]
    assert column_at(VALUES[:0], np.array([-1, -1])).tolist() == [-1, -1]


@pytest.mark.parametrize("width", [None, 2])
def test_taking_many_arrays_is_taking_each(width: int | None) -> None:
    rng = np.random.default_rng(3)
    lengths = rng.integers(0, 4, 40_000)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    shape = (int(offsets[-1]),) if width is None else (int(offsets[-1]), width)
    ragged = Ragged(rng.integers(0, 1000, shape), offsets)
    rows = rng.permutation(40_000)[:35_000]
    taken = ragged.take(rows)
    np.testing.assert_array_equal(taken.lengths, lengths[rows])
    for row in (0, 1, 16_383, 16_384, 34_999):
        np.testing.assert_array_equal(taken[row], ragged[int(rows[row])])


def test_one_array_of_a_column_is_read_alone_and_is_the_same(tmp_path: Path) -> None:
    with TraceBuilder(tmp_path / "t.h5") as builder:
        one, other = builder.process(role="decode"), builder.process(role="prefill")
        for room in range(50):
            for process in (one, other):  # interleaved, so that the table has to be ordered
                process.store(room=room, slots=np.arange(room) + process.number)
    with open_trace(tmp_path / "t.h5") as trace:
        alone = [trace.fresh_table("store").array("slots", row).tolist() for row in range(100)]
        whole = trace.table("store").ragged("slots")
        assert alone == [values.tolist() for values in whole]
        assert trace.table("store").array("slots", 7).tolist() == alone[7]
        assert trace.fresh_table("store").array("positions", 3).tolist() == []
        with pytest.raises(IndexError):
            trace.fresh_table("store").array("slots", 100)


@pytest.mark.parametrize("bounds", [(0, 100), (0, 7), (45, 55), (98, 100), (30, 30)])
def test_some_arrays_of_a_column_are_read_alone_and_are_the_same(
    tmp_path: Path, bounds: tuple[int, int]
) -> None:
    with TraceBuilder(tmp_path / "t.h5") as builder:
        one, other = builder.process(role="decode"), builder.process(role="prefill")
        for room in range(50):
            for process in (one, other):
                process.store(room=room, slots=np.arange(room * 40) + process.number)
    with open_trace(tmp_path / "t.h5") as trace:
        part = trace.fresh_table("store").arrays("slots", *bounds)
        lengths = trace.fresh_table("store").lengths("slots")
        whole = trace.table("store").ragged("slots")
        assert len(part) == bounds[1] - bounds[0]
        assert lengths.tolist() == whole.lengths.tolist()
        for number, row in enumerate(range(*bounds)):
            np.testing.assert_array_equal(part[number], whole[row])
        assert len(trace.table("store").arrays("slots", *bounds)) == len(part)
        assert trace.fresh_table("store").arrays("positions", *bounds).lengths.sum() == 0
