"""One request among random healthy ones meets a fault of random size: it alone is named, by its kind and place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from capture_hooks.layouts import layout
from replay.verdict import Donor, PageFinding
from tests.property.histories import History, moves, settings_of_scene
from tests.property.test_verdict_healthy import folder, quick, seldom_seen
from tests.scenarios.outcome import expect, expect_clean, page_finding, verdict_of
from tests.scenarios.pattern import ROWS
from tests.scenarios.side import Job

LAYERS = (0, 3)
ROOM = 8000

#: A number that a story scales to what it needs.
share = st.integers(0, 10**6)
plans = st.tuples(moves.map(lambda plan: plan[:25]), moves.map(lambda plan: plan[:12]))


class Hit:
    """A history, the job that is hit in the middle of it, and what must be said of it."""

    def __init__(self, path: Any, plan: Any, lifo: bool, how: dict[str, Any]) -> None:
        self.history = History(path, lifo=lifo, **how)
        self.scene = self.history.scene
        self.spec = layout(how["format"])
        self.keep = how["keep"]
        self.after = plan[1]
        self.history.start(63)
        self.history.play(plan[0])
        self.history.drain()
        self.history.start(101)
        self.wanted: dict[int, list[PageFinding]] = {layer: [] for layer in LAYERS}
        self.differs: dict[tuple[int, int], Any] = {}

    def job(self, rows: int, q: int = 0, room: int = ROOM, decode: Sequence[int] = ()) -> Job:
        count = -(-rows // ROWS)
        source = self.history.take("prefill", count)
        more = self.history.take("decode", count - len(decode))
        assert source is not None
        assert more is not None
        return Job(room, q, rows, source, [*decode, *more])

    def right(self, job: Job) -> dict[int, Any]:
        """The right bytes of each page, by layer, as the source's store leaves them."""
        return {layer: self.scene.prefill.memory[layer][job.prefill].copy() for layer in LAYERS}

    def compare(
        self,
        job: Job,
        right: dict[int, Any],
        pages: Sequence[int],
        *,
        donors: Any = None,
        role: str = "decode",
    ) -> None:
        """Whatever of the valid rows now differs from ``right`` must be named."""
        side = self.scene.decode if role == "decode" else self.scene.prefill
        physical = job.decode if role == "decode" else job.prefill
        for layer in LAYERS:
            for k in pages:
                seen = side.memory[layer][physical[k]]
                found = page_finding(
                    k,
                    physical[k],
                    seen,
                    right[layer][k],
                    rows=job.rows - k * ROWS,
                    keep=self.keep,
                    spec=self.spec,
                    donor=donors(layer, k) if donors else None,
                )
                if found.value_rows or found.scale_rows:
                    self.wanted[layer].append(found)
                    self.differs[layer, k] = np.flatnonzero(seen != right[layer][k])

    def judge(self, code: str, kind: str, stage: str, *, surely: bool = True, **more: Any) -> None:
        """``surely``: it must be named; otherwise it may be left unclassified at that stage."""
        self.history.play(self.after)
        self.history.drain()
        verdict = verdict_of(self.scene)
        if not surely and {finding.code for finding in verdict.findings} == {"unclassified"}:
            code, kind, more = "unclassified", "unclassified", {"confidence": None}
        layers = [layer for layer in LAYERS if self.wanted[layer]]
        if not layers:
            expect_clean(verdict)
            return
        for layer in layers:
            finding = next(
                f
                for f in expect(verdict, code, kind, stage, room=ROOM, layers=layers, **more)
                if f.layer == layer
            )
            assert [_plain(page) for page in finding.pages] == [_plain(page) for page in self.wanted[layer]]
            for page, wanted in zip(finding.pages, self.wanted[layer], strict=True):
                self.check_ranges(layer, page, wanted)

    def check_ranges(self, layer: int, page: PageFinding, wanted: PageFinding) -> None:
        """All differing bytes of the named rows are covered, and nothing outside those rows.

        A range may begin and end with its rows or, where bytes were kept, with the differing bytes.
        """
        named, rows = _bytes(page), _bytes(wanted)
        assert named <= rows
        if self.keep == "digests":
            assert named == rows
        assert set(self.differs[layer, page.logical].tolist()) & rows <= named


def _plain(page: PageFinding) -> tuple[Any, ...]:
    return (page.logical, page.value_rows, page.scale_rows, page.bytes_differing, page.donor)


def _bytes(page: PageFinding) -> set[int]:
    return {byte for start, stop in page.byte_ranges for byte in range(start, stop)}


def begin(hit: Hit, rows: int) -> Job:
    job = hit.job(rows)
    hit.scene.start(job)
    hit.scene.announce(job)
    return job


def tear(hit: Hit, rows: int, cut: int, pages: int, tail: bool, lost: bool) -> None:
    """The bytes up to a cut (or from it on) have arrived when completion is told, in some of the pages."""
    scene, job = hit.scene, begin(hit, rows)
    scene.store(job, 0, rows)
    torn = [k for k in job.logical() if pages >> k & 1] or [0]
    at = cut % hit.spec.page_bytes
    transfer = scene.post(job)
    span = (at, hit.spec.page_bytes) if tail else (0, at)
    scene.land(transfer, only=span, pages=[job.decode[k] for k in torn])
    scene.done(transfer)
    hit.compare(job, hit.right(job), torn)
    scene.arrive(job)
    scene.read(job)
    if not lost:
        scene.land(transfer)
    scene.look("LT", job)


def send_early(hit: Hit, rows: int, first: int, count: int) -> None:
    """A run of rows is stored after the bytes were taken."""
    scene, job = hit.scene, begin(hit, rows)
    late = first % rows
    until = late + 1 + count % (rows - late)
    p, spec = scene.prefill, hit.spec
    old = {layer: p.memory[layer][job.prefill].copy() for layer in LAYERS}
    step = scene.step()
    slots = scene.write(p, job, 0, rows)
    right = hit.right(job)
    for layer in LAYERS:
        page, row = np.divmod(slots[late:until], ROWS)
        of = np.arange(late, until) // ROWS
        spec.values(p.memory[layer])[page, row] = spec.values(old[layer])[of, row]
        if spec.scale_bytes:
            spec.scales(p.memory[layer])[page, row] = spec.scales(old[layer])[of, row]
    begun = p.seq + 1
    transfer = scene.post(job, written=0, awaited=0)
    scene.land(transfer)
    hit.compare(job, right, job.logical(), role="prefill")
    scene.done(transfer)
    scene.write(p, job, late, until)
    scene.tell_store(p, job, 0, slots, step, stream=1, begin_seq=begun)
    scene.seen_stored(p, job, 0, rows, step)
    scene.arrive(job)
    scene.look("LT", job)
    scene.read(job)


def overtake(hit: Hit, rows: tuple[int, int], where: int, cut: int | None, later: str) -> None:
    """Some of A's pages go to B in any place; all of A's write lands in them, or only the bytes up to a cut."""
    scene = hit.scene
    a = hit.job(rows[0], q=7, room=ROOM + 1)
    scene.start(a)
    scene.announce(a)
    scene.store(a, 0, a.rows)
    late = scene.post(a)
    scene.free(scene.decode, a, "abort")
    chosen = [page for k, page in enumerate(a.decode) if where >> k & 1] or a.decode[:1]
    chosen = chosen[: -(-rows[1] // ROWS)]
    if where & 64:
        chosen.reverse()
    b = hit.job(rows[1], decode=chosen)
    scene.start(b)
    scene.announce(b)
    scene.store(b, 0, b.rows)
    scene.send(b)
    scene.arrive(b)
    right = {layer: scene.decode.memory[layer][b.decode].copy() for layer in LAYERS}
    if later == "before":
        scene.look("LT", b)
    only = None
    if cut is not None:
        # Where only digests were kept, a row that arrived in part cannot be recognised.
        step = 1 if hit.keep == "bytes" else hit.spec.value_bytes
        only = (0, hit.spec.value_bytes + cut % (hit.spec.scale_base - hit.spec.value_bytes) // step * step)
    scene.land(late, only=only, pages=a.decode)
    scene.done(late)

    def donor(layer: int, k: int) -> Donor | None:
        return Donor(ROOM + 1, layer, a.decode.index(b.decode[k])) if b.decode[k] in a.decode else None

    hit.compare(b, right, b.logical(), donors=donor)
    scene.read(b)
    if later == "after":
        scene.look("LT", b)


def tear_table(hit: Hit, rows: int, entries: int, shift: int) -> list[int]:
    """Some entries of one read's table are another request's; returns which."""
    scene = hit.scene
    other = scene.healthy(hit.job(190, q=8, room=ROOM + 1))
    job = scene.healthy(hit.job(rows))
    torn = [k for k in job.logical() if entries >> k & 1] or [0]
    table = list(job.decode)
    for k in torn:
        table[k] = other.decode[(k + shift) % 3]
    scene.read(job, table=table)
    scene.read(job)
    return torn


ROW_COUNT = st.integers(1, 190)
TEARS = st.fixed_dictionaries(
    {"rows": ROW_COUNT, "cut": share, "pages": share, "tail": st.booleans(), "lost": st.booleans()}
)
EARLY = st.fixed_dictionaries({"rows": ROW_COUNT, "first": share, "count": share})
OVERTAKEN = st.fixed_dictionaries(
    {
        "rows": st.tuples(ROW_COUNT, ROW_COUNT),
        "where": share,
        "cut": st.one_of(st.none(), share),
        "later": st.sampled_from(["before", "after"]),
    }
)
TABLES = st.fixed_dictionaries(
    {"rows": st.integers(65, 190), "entries": st.integers(1, 7), "shift": st.integers(0, 2)}
)


@quick
@given(plan=plans, lifo=st.booleans(), how=settings_of_scene, fault=TEARS)
def test_a_torn_arrival_is_early_if_it_completes_and_lost_if_not(
    plan: Any, lifo: bool, how: dict[str, Any], fault: dict[str, Any]
) -> None:
    with folder() as path:
        hit = Hit(path, plan, lifo, how)
        tear(hit, **fault)
        if fault["lost"]:
            # Where both sides' pages had the same earlier owner, the old bytes may be those of either side.
            # By digest alone, a row that the cut goes through may as well be one of another place.
            known = "certain" if how["keep"] == "bytes" else None
            hit.judge("F31", "lost-on-wire", "wire", surely=False, confidence=known)
        else:
            hit.judge("F09", "completion-early", "completion")


@quick
@given(plan=plans, lifo=st.booleans(), how=settings_of_scene, fault=EARLY)
def test_rows_that_are_stored_after_the_post_were_sent_before_written(
    plan: Any, lifo: bool, how: dict[str, Any], fault: dict[str, Any]
) -> None:
    with folder() as path:
        hit = Hit(path, plan, lifo, how)
        send_early(hit, **fault)
        hit.judge("F10", "sent-before-written", "source")


@quick
@given(plan=plans, lifo=st.booleans(), how=settings_of_scene, fault=OVERTAKEN)
def test_pages_that_an_aborted_write_hits_are_named_with_its_owner(
    plan: Any, lifo: bool, how: dict[str, Any], fault: dict[str, Any]
) -> None:
    with folder() as path:
        hit = Hit(path, plan, lifo, how)
        overtake(hit, **fault)
        # A part that is small may be too little to be certain of.
        whole = fault["cut"] is None
        hit.judge("F14", "late-foreign-write", "destination", confidence="certain" if whole else None)


@quick
@given(plan=plans, lifo=st.booleans(), how=settings_of_scene, fault=TABLES)
def test_foreign_entries_of_a_table_are_named_with_their_owner(
    plan: Any, lifo: bool, how: dict[str, Any], fault: dict[str, Any]
) -> None:
    with folder() as path:
        hit = Hit(path, plan, lifo, how)
        torn = tear_table(hit, **fault)
        hit.history.play(hit.after)
        hit.history.drain()
        found = expect(verdict_of(hit.scene), "F18", "torn-block-table", "table", room=ROOM, layers=LAYERS)
        for finding in found:
            assert [page.logical for page in finding.pages] == torn
            assert [page.donor for page in finding.pages] == [
                Donor(ROOM + 1, finding.layer, (k + fault["shift"]) % 3) for k in torn
            ]


@quick
@given(
    plan=plans,
    lifo=st.booleans(),
    how=settings_of_scene,
    gone=seldom_seen,
    fault=st.one_of(
        st.tuples(st.just(tear), TEARS),
        st.tuples(st.just(send_early), EARLY),
        st.tuples(st.just(overtake), OVERTAKEN),
        st.tuples(st.just(tear_table), TABLES),
    ),
)
def test_a_fault_of_which_little_was_seen_is_weaker_and_never_another_kind(
    plan: Any,
    lifo: bool,
    how: dict[str, Any],
    gone: set[str],
    fault: tuple[Callable[..., Any], dict[str, Any]],
) -> None:
    story, numbers = fault
    kinds = {"tear": "F09", "send_early": "F10", "overtake": "F14", "tear_table": "F18"}
    code = "F31" if numbers.get("lost") else kinds[story.__name__]
    with folder() as path:
        hit = Hit(path, plan, lifo, how | {"drop": gone})
        story(hit, **numbers)
        hit.history.play(hit.after)
        for finding in verdict_of(hit.scene).findings:
            assert finding.request.room == ROOM
            assert finding.code in (code, "unclassified"), (finding.code, finding.stage, finding.evidence)
