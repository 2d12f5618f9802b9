"""``replay timeline``: every event of a request or a page, in an order that is proved or marked as open."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analysis.event_text import BufferPage, Entry
from analysis.pictures import Wanted, picture
from analysis.plots import inline_svg
from analysis.timeline_text import page_entries, request_entries, timeline_text
from replay import cli
from replay.trace.builder import TraceBuilder
from replay.trace.reader import open_trace
from replay.verdict import Verdict
from tests.scenarios.scene import Scene
from tests.scenarios.test_s2_late_foreign_write import overtaken


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """S2: room 7000 is aborted, its pages go to room 7001, and its write lands late. Two layers."""
    scene = overtaken(Scene(tmp_path_factory.mktemp("s2"), layers=(2, 6)), later="after", told=True)
    scene.close()
    return scene.paths[0]


def texts(entries: list[Entry]) -> list[str]:
    return [entry.text for entry in entries]


def test_a_request_is_told_from_start_to_read(pair: Path) -> None:
    with open_trace(pair) as trace:
        entries = request_entries(trace, 7001)

    said = "\n".join(texts(entries))
    order = [
        "request start, 256 tokens, 256 rows",
        "store rows 0..255",
        "ST ",
        "announce logical 0..3 = pages 12..15, item length 8448",
        "announce told (7001.0)",
        "announce heard (7001.0)",
        "SE before",
        "send transfer 3 chunk 0 (last) pages 24..27 -> 12..15",
        "transfer 3 done",
        "status heard",
        "RC logical",
        "RD before",
        "read step",
        "RD after",
        "LT ",
    ]
    places = [said.find(part) for part in order]
    assert -1 not in places
    assert places[1:] == sorted(places[1:])


def test_a_request_is_told_with_its_row_once_it_has_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with TraceBuilder(tmp_path / "t.h5") as builder:
        process = builder.process(role="prefill")
        process.request(room=7, tokens=8)
        process.request(room=7, tokens=8, req_pool_idx=3, generation=2)
        process.request(room=7, phase="arrived", req_pool_idx=3)
        process.alloc(room=7, pages=[1])
    with open_trace(tmp_path / "t.h5") as trace:
        assert texts(request_entries(trace, 7))[:3] == [
            "request start, 8 tokens", "request start, 8 tokens, req_pool_idx 3 (generation 2)",
            "request arrived, req_pool_idx 3",
        ]  # fmt: skip
    assert cli.run(["timeline", str(tmp_path / "t.h5"), "--request", "7", "--json"]) == 0
    events = json.loads(capsys.readouterr().out)["events"]
    assert [(event["kind"], event["req_pool_idx"], event["generation"]) for event in events] == [
        ("request", -1, -1), ("request", 3, 2), ("request", 3, -1), ("alloc", -1, -1)
    ]  # fmt: skip


def test_layers_of_one_event_share_a_line(pair: Path) -> None:
    with open_trace(pair) as trace:
        stores = [entry for entry in request_entries(trace, 7001) if entry.kind == "store"]

    assert [entry.layers for entry in stores] == [(2, 6)]


def test_edges_prove_the_order_and_the_rest_is_marked(pair: Path) -> None:
    with open_trace(pair) as trace:
        entries = request_entries(trace, 7001)

    by_text = {entry.text: entry for entry in entries}
    assert by_text["announce heard (7001.0)"].ordered
    assert by_text["status heard (7001.0)"].ordered
    starts = [entry for entry in entries if entry.kind == "request" and "start" in entry.text]
    assert [entry.ordered for entry in starts] == [True, False], "nothing orders the two starts"


def test_a_page_tells_who_had_it_and_who_wrote_it(pair: Path) -> None:
    with open_trace(pair) as trace:
        entries = page_entries(trace, BufferPage(1, "index_k", 2, 14))

    said = texts(entries)
    late = said.index("transfer 2 done room 7000")
    arrived = next(i for i, text in enumerate(said) if text.startswith("RC room 7001"))
    read = next(i for i, text in enumerate(said) if text.startswith("RD before room 7001"))
    assert arrived < late < read
    assert said.index("free room 7000 pages 14..17 (abort)") < said.index("alloc room 7001 as logical 2")
    held = [text.rpartition(" ")[2] for text in said if " holds " in text]
    assert held[-1] != held[-4], "what the reads see is not what arrived"
    assert all(entry.layers in ((), (2,)) for entry in entries)


def test_a_page_of_the_source_lists_its_stores_and_sends(pair: Path) -> None:
    with open_trace(pair) as trace:
        kinds = {entry.kind for entry in page_entries(trace, BufferPage(0, "index_k", 6, 20))}

    assert {"alloc", "store", "snapshot", "send", "transfer_state"} <= kinds


def test_a_page_tells_what_its_own_process_did_to_it(tmp_path: Path) -> None:
    path, base, page = tmp_path / "t.h5", 1 << 32, 8448
    with TraceBuilder(path) as builder:
        side = builder.process(role="decode")
        for buffer in (0, 1):
            side.buffer(buffer=buffer, layer=buffer, pages=8, address=base + buffer * 8 * page)
        side.store(room=1, buffer=0, slots=[3 * 64, 4 * 64], logical_rows=[0, 64], positions=[0, 64])
        side.store(room=1, buffer=0, slots=[-1], logical_rows=[0], positions=[0])
        side.store(room=1, buffer=0, slots=[64], logical_rows=[0], positions=[0], stride=3 * page)
        side.copy(room=1, operation="clear", buffer=0, ids=[3], length=page)
        side.copy(room=1, operation="clear", buffer=1, ids=[3], length=page)
        side.copy(room=1, operation="offload", source_buffer=0, source_ids=[3], ids=[90], length=page)
        side.copy(room=1, operation="move", unit="row", source_buffer=0, buffer=0, source_ids=[3 * 64 + 63],
                  ids=[5 * 64], length=132, stride=132)  # fmt: skip
    with open_trace(path) as trace:
        told = texts(page_entries(trace, BufferPage(0, "index_k", 0, 3)))
        last = texts(page_entries(trace, BufferPage(0, "index_k", 0, 7)))
        drawn = picture("ownership", trace, Verdict("clean"), Wanted(place=BufferPage(0, "index_k", 0, 3)))

    assert [text.replace(" room 1", "") for text in told] == [
        "store rows 0,64 in slots 192,256",
        "store rows 0 in slots 64",
        "clear pages 3, 8,448 bytes a page",
        "offload pages 3 -> 90, 8,448 bytes a page",
        "move rows 255 -> 320, 132 bytes a row",
    ]
    assert last == [], "the padding row is nobody's"
    assert "copied or cleared by its own process" in inline_svg(drawn.figure, "a")


@pytest.mark.parametrize("key", ["1.0", "1.0/0a1b2c3d4e"])
def test_a_late_thread_is_listed_where_its_edges_allow(tmp_path: Path, key: str) -> None:
    """The clocks of two hosts say the opposite of the protocol; the protocol wins."""
    path = tmp_path / "t.h5"
    with TraceBuilder(path) as builder:
        ahead = builder.process(role="prefill", host="a")
        behind = builder.process(role="decode", host="b")
        behind.request(room=1, phase="start", begin_ns=9_000_000, end_ns=9_000_000)
        behind.order(what="announce", key=key, end="tail", begin_ns=9_000_001, end_ns=9_000_001)
        ahead.order(what="announce", key=key, end="head", begin_ns=5, end_ns=5)
        ahead.send(transfer=1, room=1, begin_ns=6, end_ns=6)
    with open_trace(path) as trace:
        entries = request_entries(trace, 1)

    assert [entry.kind for entry in entries] == ["request", "order", "order", "send"]
    assert all(entry.ordered for entry in entries)


def test_a_contradiction_in_the_trace_still_gives_every_line(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    with TraceBuilder(path) as builder:
        one, two = builder.process(role="prefill"), builder.process(role="decode")
        one.order(what="status", key="1.0", end="head")
        one.order(what="announce", key="1.0", end="tail")
        two.order(what="announce", key="1.0", end="head")
        two.order(what="status", key="1.0", end="tail")
        one.request(room=1)
        two.request(room=1)
    with open_trace(path) as trace:
        assert len(request_entries(trace, 1)) == 6


def test_attempts_of_one_room_can_be_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    with TraceBuilder(path) as builder:
        side = builder.process(role="decode")
        for attempt in (0, 1):
            side.request(room=1, attempt=attempt, rows=attempt + 10)
    with open_trace(path) as trace:
        assert len(request_entries(trace, 1)) == 2
        assert texts(request_entries(trace, 1, 1)) == ["request start, 11 rows"]


def test_one_thing_is_not_told_as_several(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    with TraceBuilder(path) as builder:
        side = builder.process(role="decode")
        for number in (1, 2):
            side.request(room=number, tokens=number, rows=number)
            side.send(room=number, transfer=number, source=[[0, 8]] * number, destination=[[0, 8]] * number)
            side.copy(room=number, operation="clear", ids=[3], length=number)
    with open_trace(path) as trace:
        one, two = (request_entries(trace, number) for number in (1, 2))
        assert timeline_text(trace, "room 1", one[:1]).startswith("room 1: 1 line; ")
        assert timeline_text(trace, "room 2", two).startswith("room 2: 3 lines; ")

    assert texts(one) == [
        "request start, 1 token, 1 row", "send transfer 1, 1 descriptor", "clear pages 3, 1 byte a page"
    ]  # fmt: skip
    assert texts(two) == [
        "request start, 2 tokens, 2 rows", "send transfer 2, 2 descriptors", "clear pages 3, 2 bytes a page"
    ]  # fmt: skip


def test_nothing_of_a_trace_reaches_the_terminal_raw(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    with TraceBuilder(path) as builder:
        builder.process(role="decode").free(room=1, pages=[3], reason="\x1b[2Jboo\n")
    with open_trace(path) as trace:
        text = timeline_text(trace, "room 1", request_entries(trace, 1))

    assert "free pages 3 (?[2Jboo?)" in text


def test_the_command_lists_a_request(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["timeline", str(pair), "--request", "7001"]) == 0

    out = capsys.readouterr().out
    assert out.startswith("room 7001: ")
    assert "P0 is prefill rank 0, D0 is decode rank 0" in out
    assert "[index_k 2,6]" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out


def test_a_request_names_the_foreign_write_into_its_pages(pair: Path) -> None:
    with open_trace(pair) as trace:
        hit = "\n".join(texts(request_entries(trace, 7001)))
        writer = "\n".join(texts(request_entries(trace, 7000)))

    assert "foreign, room 7000: send transfer 2 " in hit
    assert "foreign, room 7000: transfer 2 done" in hit
    assert hit.index("RC logical") < hit.index("foreign, room 7000: transfer 2 done") < hit.index("RD after")
    assert "foreign" not in writer, "room 7001's own transfer came after 7000 had given its pages back"


def test_a_page_of_both_sides_is_told_for_each(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["timeline", str(pair), "--page", "index_k/2/14"]) == 0

    out = " ".join(capsys.readouterr().out.split())
    assert "page 14 of index_k layer 2, prefill rank 0 (--process 0)" in out
    assert "page 14 of index_k layer 2, decode rank 0 (--process 1)" in out


def test_the_command_gives_json(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["timeline", str(pair), "--page", "index_k/2/14", "--process", "1", "--json"]) == 0

    body = json.loads(capsys.readouterr().out)
    assert body["schema"] == "kv-replay/timeline/1"
    assert body["title"] == "page 14 of index_k layer 2, decode rank 0"
    assert {"seq", "ordered", "text", "layers", "begin_ns"} <= body["events"][0].keys()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "either --request"),
        (["--request", "1", "--page", "index_k/2/14"], "either --request"),
        (["--request", "x"], "not a room number"),
        (["--request", "1.x"], "not a room number"),
        (["--page", "14"], "BUFFER/LAYER/PAGE"),
        (
            ["--page", "index_k/2/14", "--json"],
            "add --process with one of 0 (prefill rank 0), 1 (decode rank 0)",
        ),
        (["--page", "index_k/9/14"], "it has index_k/2, index_k/6"),
        (["--page", "index_k/2/99999"], "no process has page 99999"),
        (["--page", "index_k/2/14", "--process", "5"], "no process has page 14"),
    ],
)
def test_the_command_says_what_is_missing(
    args: list[str], said: str, pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["timeline", str(pair), *args]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
