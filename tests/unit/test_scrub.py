"""What a copy for strangers holds: only what is on a list, and the same verdict."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from replay.judge import JudgeOptions, judge
from replay.scrub import TEXTS, Scrub
from replay.trace.builder import TraceBuilder
from replay.trace.merge import copy
from replay.trace.reader import open_trace
from replay.trace.schema import TABLES
from replay.trace.verify import verify
from replay.trace.writer import TraceWriter
from replay.verdict import Verdict
from tests.scenarios.planted import places, planted_scene
from tests.scenarios.scene import Job, Scene
from tests.scenarios.test_s2_late_foreign_write import overtaken
from tests.scenarios.test_several_tellings import told

OPTIONS = JudgeOptions(reexecute=False)


def scrubbed(paths: list[Path], out: Path) -> Path:
    with open_trace(*paths) as trace, TraceWriter(out) as writer:
        copy(trace, writer, rewrite=Scrub(trace))
    return out


def verdict_of(path: Path) -> Verdict:
    with open_trace(path) as trace:
        return judge(trace, OPTIONS)


def test_every_column_of_text_has_a_policy_and_every_place_is_planted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = {f"{t}.{c.name}" for t, found in TABLES.items() for c in found if c.kind == "str"}
    assert set(TEXTS) == {place for place in columns if not place.startswith("process.")}

    scene, used = planted_scene(tmp_path, monkeypatch, lambda place: f"SECRET-{place}")
    scene.close()
    # The format of contents must be a known one, and how a process ended is told by the journal's reader.
    left = places() - used - {f"process.{name}" for name in ("role", "mode", "cut")}
    assert left <= {"buffer.format", "content.format", "order.end"}


def test_nothing_planted_is_left_and_the_verdict_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, _ = planted_scene(tmp_path, monkeypatch, lambda place: f"SECRET-{place}")
    scene.close()
    out = scrubbed(scene.paths, tmp_path / "out.h5")

    assert not verify(out).problems
    with open_trace(out) as trace:
        assert [text for text in trace.strings if "SECRET" in text] == []
    before, after = verdict_of(scene.paths[0]), verdict_of(out)
    assert before.findings
    assert (after.verdict, after.cleared) == (before.verdict, before.cleared)
    for old, new in zip(before.findings, after.findings, strict=True):
        assert (old.code, old.stage, old.confidence, old.request, old.pages) == (
            new.code, new.stage, new.confidence, new.request, new.pages
        )  # fmt: skip


def test_the_row_of_a_request_stays_though_its_id_goes(tmp_path: Path) -> None:
    with TraceBuilder(tmp_path / "in.h5") as builder:
        builder.process(role="decode").request(room=7, rid="1f" * 8, req_pool_idx=3, generation=2)
    with open_trace(scrubbed([tmp_path / "in.h5"], tmp_path / "out.h5")) as trace:
        table = trace.table("request")
        assert [table[name].tolist() for name in ("rid", "req_pool_idx", "generation")] == [[""], [3], [2]]


def test_addresses_are_offsets_that_keep_their_distances(tmp_path: Path) -> None:
    scene = overtaken(Scene(tmp_path, layers=(0, 1)))
    scene.close()
    out = scrubbed(scene.paths, tmp_path / "out.h5")

    with open_trace(*scene.paths) as before, open_trace(out) as after:
        for name in ("source", "destination"):
            old = before.table("send").ragged(name).values.astype(np.int64)
            new = after.table("send").ragged(name).values.astype(np.int64)
            assert len(set((old[:, 0] - new[:, 0]).tolist())) == 1
            assert new[:, 0].max() < 1 << 40 < old[:, 0].min()
            np.testing.assert_array_equal(old[:, 1], new[:, 1])
        old, new = (trace.table("buffer")["address"].reshape(2, 2) for trace in (before, after))
        assert (new - old[:, :1]).max() < 0
        np.testing.assert_array_equal(new, old - old[:, :1] + (1 << 32))


def test_a_far_descriptor_or_an_untold_address_gives_no_other_away(tmp_path: Path) -> None:
    heap = 0x7F12_3456_7000
    with TraceBuilder(tmp_path / "t.h5") as builder:
        p = builder.process(role="prefill")
        p.buffer(buffer=0, pages=4, address=heap)
        p.buffer(buffer=1, pages=4, address=0)
        p.send(transfer=1, source=[[4096, 10], [heap - 100, 200], [heap + 8448, 8448]],
               destination=[[heap, 10], [5, 200], [0, 8448]])  # fmt: skip
    out = scrubbed([tmp_path / "t.h5"], tmp_path / "out.h5")

    with open_trace(out) as trace:
        base = 1 << 32
        assert trace.table("buffer")["address"].tolist() == [base, 0]
        assert trace.table("send").ragged("source").values.tolist() == [
            [1, 10], [base - 100, 200], [base + 8448, 8448]
        ]  # fmt: skip
        assert trace.table("send").ragged("destination").values[:, 0].tolist() == [1, 5 + base, 0]


def test_times_threads_and_streams_start_anew_and_keep_their_order(tmp_path: Path) -> None:
    with TraceBuilder(tmp_path / "t.h5") as builder:
        p = builder.process(role="prefill", host="somewhere")
        begin = 987_654_321_000_000
        p.alloc(room=1, pages=[1], thread=140_000_000_000_001, begin_ns=begin, end_ns=begin + 5)
        p.alloc(room=1, pages=[2], thread=139_000_000_000_009, stream=94_000_000_000_007, begin_ns=begin + 9)
        p.clock(moment="alive", wall_ns=1_700_000_000_000_000_000, monotonic_ns=begin + 7, begin_ns=begin + 7)
    out = scrubbed([tmp_path / "t.h5"], tmp_path / "out.h5")

    with open_trace(out) as trace:
        table = trace.table("alloc")
        assert trace.processes[0].host == "host-A"
        assert table["thread"].tolist() == [2, 1]
        assert table["stream"].tolist() == [-1, 0]
        first = trace.table("process")["begin_ns"][0]
        assert first == 0
        assert (table["end_ns"] - table["begin_ns"]).tolist()[0] == 5
        assert trace.table("clock")["wall_ns"].tolist() == [0]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("lab", "lab"),
        ("sglang 0.5.23", "sglang 0.5.23"),
        ("sglang 0.5.23.post1", "sglang 0.5.23.post1"),
        ("sglang 0.5.23+carol.laptop", "other"),
        ("my secret engine", "other"),
        ("", ""),
    ],
)
def test_an_engine_is_a_known_name_and_a_version(given: str, kept: str, tmp_path: Path) -> None:
    with TraceBuilder(tmp_path / "t.h5") as builder:
        builder.process(role="prefill", engine=given)
    with open_trace(scrubbed([tmp_path / "t.h5"], tmp_path / "out.h5")) as trace:
        assert trace.processes[0].engine == kept


def test_versions_and_devices_stay_and_all_else_goes(tmp_path: Path) -> None:
    told = {
        "torch": "2.13.0+cu130", "numpy": "2.4.6", "python": "3.11.7", "machine": "x86_64", "system": "Linux",
        "device": "NVIDIA H200", "triton": "3.9.0+git.carol", "hostname": "gpu17.corp", "sglang": "/home/carol/sglang",
    }  # fmt: skip
    options = {"mode": "pages", "read_every": 8, "capture": "/home/carol", "taps": ["read", "carol"], "x": 1}
    with TraceBuilder(tmp_path / "t.h5") as builder:
        builder.process(role="prefill", environment=told, options=options)
    with open_trace(scrubbed([tmp_path / "t.h5"], tmp_path / "out.h5")) as trace:
        (process,) = trace.processes
    assert process.environment == {
        key: told[key] for key in ("torch", "numpy", "python", "machine", "system", "device")
    }
    assert process.options == {"mode": "pages", "read_every": 8}


def test_which_rank_told_which_is_a_letter_that_both_ends_share(tmp_path: Path) -> None:
    scene = told(Scene(tmp_path), "0a1b2c3d4e.0", "done")
    scene.close()
    out = scrubbed(scene.paths, tmp_path / "out.h5")
    with open_trace(out) as trace:
        order = trace.table("order")
        told_keys = [str(key) for key in order["key"][order["what"] == "status"] if "7000" in str(key)]
    assert told_keys == ["7000.0/who-A"] * 2
    (before,), (after,) = verdict_of(scene.paths[0]).findings, verdict_of(out).findings
    assert (before.code, before.confidence) == (after.code, after.confidence) == ("F09", "certain")


def test_two_sides_of_one_clean_request_stay_clean(tmp_path: Path) -> None:
    scene = Scene(tmp_path, split=True, threads=True)
    scene.healthy(Job(5, 0, 100, [1, 2], [3, 4]), finish=True)
    scene.close()

    assert verdict_of(scrubbed(scene.paths, tmp_path / "out.h5")).verdict == "clean"
