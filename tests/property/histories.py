"""Random honest histories: many requests that start, share, chunk, abort, finish and reuse pages at random.

A history is a list of plain moves, so that hypothesis can shrink it. Whatever the moves, the engine that is
told here is right: it waits for stores before it posts, for the acknowledgement before it reuses the pages of an
aborted transfer, and its last step may overshoot a finished request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.scenarios.pattern import ROWS
from tests.scenarios.scene import Scene
from tests.scenarios.side import Job, Transfer

MOVES = ("start", "go", "go", "go", "append", "read", "finish", "abort", "overshoot")
PAGES = 28

#: (move, which request, how much)
moves = st.lists(
    st.tuples(st.sampled_from(MOVES), st.integers(0, 5), st.integers(0, 255)),
    min_size=4,
    max_size=60,
)
settings_of_scene = st.fixed_dictionaries(
    {
        "format": st.sampled_from(["fp8", "bf16", "fp4"]),
        "scales": st.sampled_from(["standard", "powers"]),
        "keep": st.sampled_from(["bytes", "digests"]),
        "threads": st.booleans(),
        "grouped": st.booleans(),
    }
)


@dataclass(slots=True)
class Life:
    """One request and the rest of its story."""

    job: Job
    story: Iterator[None]
    arrived: bool = False
    over: bool = False
    aborted: bool = False
    pending: list[Transfer] = field(default_factory=list)


class History:
    """Plays moves into a scene."""

    def __init__(self, folder: Path, *, lifo: bool, **how: Any) -> None:
        self.scene = Scene(folder, layers=(0, 3), pages=PAGES, **how)
        self.lifo = lifo
        self.pools = {side.role: list(range(1, PAGES)) for side in self.scene.sides}
        self.held: dict[int, int] = {}
        self.lives: list[Life] = []
        self.finished: Life | None = None
        self.started = 0

    def play(self, plan: Sequence[tuple[str, int, int]]) -> None:
        for move, which, much in plan:
            if move == "start":
                self.start(much)
                continue
            if move == "overshoot":
                self.overshoot()
                continue
            live = [life for life in self.lives if not life.over]
            if not live:
                self.start(much)
                continue
            life = live[which % len(live)]
            if move == "go":
                next(life.story, None)
            elif life.arrived and move == "append":
                self.append(life, 1 + much % 5)
            elif life.arrived and move == "read":
                self.scene.read(life.job, snapshot=bool(much % 3))
            elif life.arrived and move == "finish":
                self.finish(life, overshoot=bool(much % 2))
            elif not life.arrived and move == "abort" and much % 4 == 0:
                self.abort(life)

    def drain(self) -> None:
        """Let everything that is under way come to its end."""
        for life in self.lives:
            while not life.over and next(life.story, "end") != "end":
                pass
            if life.arrived and not life.over:
                self.scene.read(life.job)
                self.finish(life, overshoot=False)

    # Pages

    def take(self, role: str, count: int) -> list[int] | None:
        pool = self.pools[role]
        if len(pool) < count:
            return None
        taken = [pool.pop(-1 if self.lifo else 0) for _ in range(count)]
        if role == "prefill":
            self.held.update(dict.fromkeys(taken, 1))
        return taken

    # Moves

    def start(self, much: int) -> None:
        rows = 1 + much * 7 % 200
        q = self.started % 9
        prefix = self.find_prefix(rows) if much % 2 else None
        count = -(-rows // ROWS)
        shared = prefix.job.prefill[: prefix_pages(prefix.job, rows)] if prefix else []
        own = self.take("prefill", count - len(shared))
        if own is None:
            return
        target = self.take("decode", count)
        if target is None:
            self.give_back("prefill", own)
            return
        for page in shared:
            self.held[page] += 1
        job = Job(7000 + self.started, q, rows, shared + own, target)
        if prefix:
            job.prefix_q, job.prefix_rows = prefix.job.q, len(shared) * ROWS
        self.started += 1
        life = Life(job, iter(()))
        life.story = self.story(life, len(shared), chunked=bool(much & 4))
        self.lives.append(life)
        next(life.story)

    def find_prefix(self, rows: int) -> Life | None:
        """A request whose first pages are stored and whole, and its own."""
        for life in self.lives:
            if life.arrived and not life.over and not life.job.prefix_rows:
                return life if prefix_pages(life.job, rows) else None
        return None

    def story(self, life: Life, shared: int, *, chunked: bool) -> Iterator[None]:
        scene, job = self.scene, life.job
        p, d = scene.sides
        scene.begin(p, job)
        scene.begin(d, job)
        if shared:
            scene.give(p, job, job.prefill[:shared], shared=True)
        scene.give(p, job, job.prefill[shared:], logical=shared)
        scene.give(d, job, job.decode)
        yield
        scene.announce(job)
        yield
        cuts = [0, job.rows]
        whole = len(job.logical())
        if chunked and whole > shared + 1:
            cuts = [0, (shared + 1) * ROWS, job.rows]
        for chunk, (first, last) in enumerate(pairwise(cuts)):
            scene.store(job, max(first, job.prefix_rows), last)
            yield
            logical = range(first // ROWS, -(-last // ROWS))
            transfer = scene.post(job, logical, chunk=chunk, last=last == job.rows, rows=last)
            life.pending.append(transfer)
            yield
            scene.land(transfer)
            yield
            scene.done(transfer)
            life.pending.remove(transfer)
            yield
        scene.arrive(job)
        life.arrived = True
        yield
        scene.look("LT", job)
        scene.read(job)

    def append(self, life: Life, count: int) -> None:
        for _ in range(count):
            job = life.job
            if job.length == len(job.decode) * ROWS:
                more = self.take("decode", 1)
                if more is None:
                    return
                self.scene.give(self.scene.decode, job, more, logical=len(job.decode))
                job.decode += more
            self.scene.append(job)

    def finish(self, life: Life, *, overshoot: bool) -> None:
        self.release(life, "finish")
        self.finished = life
        if overshoot and life.job.length < len(life.job.decode) * ROWS:
            # The step that was launched already writes one row more, into a page that nobody owns yet.
            self.scene.append(life.job)

    def overshoot(self) -> None:
        """The last step of the request that finished last reads pages that are free or another's by now."""
        if self.finished is not None:
            self.scene.read(self.finished.job)
            self.finished = None

    def abort(self, life: Life) -> None:
        scene, job = self.scene, life.job
        p, d = scene.sides
        d.emit("request", room=job.room, attempt=job.attempt, phase="abort")
        scene.edge(d, p, "abort", job.key)
        for transfer in life.pending:
            scene.land(transfer)
            scene.done(transfer)
        life.pending.clear()
        scene.edge(p, d, "ack", job.key)
        d.emit("transfer_state", state="acknowledged", room=job.room, agent=d.agent)
        life.aborted = True
        self.release(life, "abort")

    def release(self, life: Life, reason: str) -> None:
        """Pages go back on both sides; shared ones with their last holder."""
        job = life.job
        life.over = True
        life.story = iter(())
        for side, pages in ((self.scene.prefill, job.prefill), (self.scene.decode, job.decode)):
            if side is self.scene.prefill:
                for page in pages:
                    self.held[page] -= 1
                pages = [page for page in pages if not self.held[page]]
            side.emit("request", room=job.room, attempt=job.attempt, phase=reason)
            side.emit("free", room=job.room, attempt=job.attempt, pages=pages, reason=reason)
            self.give_back(side.role, pages)

    def give_back(self, role: str, pages: Sequence[int]) -> None:
        self.pools[role] += pages


def prefix_pages(donor: Job, rows: int) -> int:
    """Whole pages of the donor's prompt that a new request of ``rows`` rows may share, leaving it a row of its own."""
    return min(donor.rows // ROWS, (rows - 1) // ROWS)
