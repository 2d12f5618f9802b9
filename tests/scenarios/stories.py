"""What most scenarios have in common: the request that they are about, and its way to the post and after arrival."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.scenarios.scene import Job, Scene
from tests.scenarios.side import Transfer


def ours(rows: int = 192) -> Job:
    """The request of a story: q0 on three pages."""
    return Job(7000, 0, rows, [21, 22, 23], [5, 6, 7])


def begun(scene: Scene, job: Job | None = None, *, used: bool = True, stored: int | None = None) -> Job:
    """All that comes before the post; ``used``: request q9 had lived on these pages.

    ``stored`` are the rows that are stored by then, all of them where it is left out.
    """
    job = job or ours()
    if used:
        scene.earlier(job.prefill, job.decode)
    scene.start(job)
    scene.announce(job)
    scene.store(job, 0, job.rows if stored is None else stored)
    return job


def arrived(scene: Scene, job: Job | None = None) -> Job:
    """The request has arrived right, and nobody has read it."""
    job = begun(scene, job)
    scene.send(job)
    scene.arrive(job)
    return job


def ended(scene: Scene, job: Job) -> None:
    """Completion is told, the pages are looked at once more and read."""
    scene.arrive(job)
    scene.look("LT", job)
    scene.read(job)


def two_receivers(
    folder: Path, *, pages: Sequence[int] = (5, 6, 7), stored: int | None = None, **how: Any
) -> tuple[Scene, Scene, Job, Job]:
    """One prefill rank and two decode ranks that it sends the request to: up to the posts.

    The second scene and job are those of the second receiver, where the request has ``pages``. ``stored``: see
    :func:`begun`.
    """
    first = Scene(folder, **how)
    second = Scene(folder, beside=first, **how)
    other = copy(first)
    other.decode, other._transfers = second.decode, 100
    job, same = begun(first, stored=stored), replace(ours(64 * len(pages)), decode=list(pages))
    other.begin(other.decode, same)
    other.give(other.decode, same, same.decode)
    other.announce(same)
    return first, other, job, same


def reused(scene: Scene, first: Job, then: Job) -> Transfer:
    """``first`` is aborted with its transfer in flight, and ``then``, which is given its pages, arrives right."""
    scene.start(first)
    scene.announce(first)
    scene.store(first, 0, first.rows)
    late = scene.post(first)
    scene.free(scene.decode, first, "abort")
    scene.start(then)
    scene.announce(then)
    scene.store(then, 0, then.rows)
    scene.send(then)
    scene.arrive(then)
    return late
