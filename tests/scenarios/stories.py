"""What most scenarios have in common: the request that they are about, and its way to the post and after arrival."""

from __future__ import annotations

from tests.scenarios.scene import Job, Scene


def ours(rows: int = 192) -> Job:
    """The request of a story: q0 on three pages."""
    return Job(7000, 0, rows, [21, 22, 23], [5, 6, 7])


def begun(scene: Scene, job: Job | None = None, *, used: bool = True) -> Job:
    """All that comes before the post; ``used``: request q9 had lived on these pages."""
    job = job or ours()
    if used:
        scene.earlier(job.prefill, job.decode)
    scene.start(job)
    scene.announce(job)
    scene.store(job, 0, job.rows)
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
