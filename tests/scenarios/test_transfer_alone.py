"""Traces of the transfer alone: what a verdict may say where nobody looked at stores and reads, and
lists that end early.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.outcome import verdict_of
from tests.scenarios.scene import Job, Scene

#: Kinds of record that a capture of the transfer alone does not have.
NO_STORE_NO_READ = ("store", "ST", "read", "RD")


def transferred(scene: Scene, job: Job) -> None:
    scene.start(job)
    scene.announce(job)
    scene.store(job, 0, job.rows)
    scene.send(job)
    scene.arrive(job)
    scene.look("LT", job)


def test_taps_that_were_off_are_scope(tmp_path: Path) -> None:
    scene = Scene(tmp_path, drop=NO_STORE_NO_READ, taps=("send", "receive"))
    transferred(scene, Job(7000, 0, 150, [21, 22, 23], [5, 6, 7]))
    verdict = verdict_of(scene)
    assert verdict.verdict == "clean"
    assert {"store", "source", "destination", "table", "read-kernel"} <= set(verdict.scope["not_in_scope"])
    assert set(verdict.cleared) == {"descriptor", "wire", "completion"}


@pytest.mark.parametrize(
    "taps", [None, ("store", "send", "receive", "read"), ("send", "receive", "read"), ("store",)]
)
def test_taps_that_ran_and_saw_nothing_are_not(tmp_path: Path, taps: tuple[str, ...] | None) -> None:
    scene = Scene(tmp_path, drop=NO_STORE_NO_READ, taps=taps)
    transferred(scene, Job(7000, 0, 150, [21, 22, 23], [5, 6, 7]))
    assert verdict_of(scene).verdict == "inconclusive"


def test_a_fault_is_found_whatever_taps_were_off(tmp_path: Path) -> None:
    scene = Scene(tmp_path, drop=NO_STORE_NO_READ, taps=("send", "receive"))
    job = Job(7000, 0, 150, [21, 22, 23], [5, 6, 7])
    scene.start(job)
    scene.announce(job)
    scene.store(job, 0, job.rows)
    transfer = scene.post(job)
    scene.land(transfer, only=(0, 4000), pages=[6])
    scene.done(transfer)
    scene.arrive(job)
    scene.look("LT", job)
    verdict = verdict_of(scene)
    assert verdict.verdict == "divergent"
    # A store that nobody watched may have written there: no lost bytes are claimed for certain.
    assert {f.confidence for f in verdict.findings} <= {"likely"}


def short_list(tmp_path: Path, **how: Any) -> Scene:
    """The sender has three pages of the request, the receiver announces two and two are carried."""
    scene = Scene(tmp_path, **how)
    job = Job(7000, 0, 128, [21, 22, 23], [5, 6])
    scene.begin(scene.prefill, job, tokens=150, rows=150)
    scene.begin(scene.decode, job)
    scene.give(scene.prefill, job, job.prefill)
    scene.give(scene.decode, job, job.decode)
    scene.announce(job)
    scene.store(job, 0, 150)
    return scene


def named(scene: Scene, pages: list[int]) -> Job:
    """The transfer: its record names ``pages``, its descriptors carry two."""
    job = Job(7000, 0, 128, [21, 22, 23], [5, 6])
    scene.send(job, [0, 1], named=pages)
    scene.arrive(job)
    scene.look("LT", job)
    return job


def test_pages_that_the_receiver_never_announced(tmp_path: Path) -> None:
    scene = short_list(tmp_path)
    scene.read(named(scene, [21, 22, 23]))
    verdict = verdict_of(scene)
    (finding,) = verdict.findings
    assert (finding.code, finding.stage, finding.confidence) == ("F02", "descriptor", "certain")
    assert [(page.logical, page.physical, page.value_rows) for page in finding.pages] == [(2, -1, ((0, 21),))]
    assert "descriptor" not in verdict.cleared


def test_a_longer_length_alone_accuses_nobody(tmp_path: Path) -> None:
    """Both sides named two pages; that one side counts more rows may have many reasons."""
    scene = short_list(tmp_path)
    scene.read(named(scene, [21, 22]))
    assert not verdict_of(scene).findings


@pytest.mark.parametrize("drop", ["receive", "send"])
def test_lists_that_are_not_recorded_whole_accuse_nobody(tmp_path: Path, drop: str) -> None:
    scene = short_list(tmp_path, drop=[drop])
    scene.read(named(scene, [21, 22, 23]))
    assert not [f for f in verdict_of(scene).findings if f.code == "F02"]


def test_a_short_list_of_a_request_that_never_read(tmp_path: Path) -> None:
    scene = short_list(tmp_path)
    job = named(scene, [21, 22, 23])
    scene.free(scene.decode, job, "abort")
    other = Job(7001, 0, 64, [30], [31])
    transferred(scene, other)
    scene.read(other)
    assert not verdict_of(scene).findings
