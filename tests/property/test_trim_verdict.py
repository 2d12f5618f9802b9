"""Cutting a trace down changes no finding of the kept part; what is cut away makes a verdict weaker at most."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from replay.judge import JudgeOptions, judge
from replay.scope import Scope
from replay.trace.merge import merge
from replay.trace.reader import open_trace
from replay.trim import trim
from replay.verdict import STAGES, Finding, Verdict
from tests.property.test_verdict_healthy import folder, quick
from tests.property.test_verdict_hit import (
    EARLY,
    OVERTAKEN,
    ROOM,
    TABLES,
    TEARS,
    Hit,
    overtake,
    plans,
    send_early,
    settings_of_scene,
    tear,
    tear_table,
)
from tests.property.test_verdict_merge_order import STORIES
from tests.scenarios.scene import Scene
from tests.scenarios.side import Job

few = settings(quick, max_examples=quick.max_examples // 2)
RANK = {"possible": 0, "likely": 1, "certain": 2}
FAULTS = st.one_of(
    st.tuples(st.just(tear), TEARS),
    st.tuples(st.just(send_early), EARLY),
    st.tuples(st.just(overtake), OVERTAKEN),
    st.tuples(st.just(tear_table), TABLES),
)
SCOPES = st.builds(
    Scope,
    rooms=st.sampled_from([None, frozenset({ROOM})]),
    layers=st.sampled_from([None, frozenset({0}), frozenset({3})]),
    logical=st.sampled_from([None, frozenset({0}), frozenset({0, 1})]),
    stages=st.one_of(
        st.none(), st.frozensets(st.sampled_from(STAGES), min_size=1, max_size=3), st.just(frozenset(STAGES))
    ),
).filter(lambda scope: not scope.whole)


def judged(paths: Iterable[Path]) -> Verdict:
    with open_trace(*paths) as trace:
        return judge(trace, JudgeOptions(reexecute=False))


def told(findings: Iterable[Finding]) -> list[tuple[Any, ...]]:
    return sorted((f.code, f.stage, f.request.room, f.layer, f.role, str(f.pages)) for f in findings)


@few
@given(plan=plans, lifo=st.booleans(), how=settings_of_scene, fault=FAULTS, scope=SCOPES)
def test_the_findings_of_the_kept_part_stay(
    plan: Any,
    lifo: bool,
    how: dict[str, Any],
    fault: tuple[Callable[..., Any], dict[str, Any]],
    scope: Scope,
) -> None:
    story, numbers = fault
    with folder() as path:
        hit = Hit(path, plan, lifo, how)
        story(hit, **numbers)
        hit.history.play(hit.after)
        hit.history.drain()
        hit.scene.close()
        whole = judged(hit.scene.paths)
        out = path / "trimmed.h5"
        done = trim(hit.scene.paths, out, scope)
        assert done.level == 0 or scope.stages is not None, "the rules kept too little"
        part = judged([out])
        inside, _ = scope.limit(whole.findings)
        assert told(part.findings) == told(inside)
        if whole.verdict == "clean":
            assert part.verdict == "clean"
        assert part.scope["cut_to"]


@few
@given(plan=plans, lifo=st.booleans(), how=settings_of_scene, fault=FAULTS, payload=st.booleans())
@example(  # the foreign page has a row that nobody had stored: its zeros are no clear once the transfer is cut away
    plan=([("start", 0, 0)] * 4, [("start", 0, 0)] * 4),
    lifo=False,
    how={"format": "fp8", "scales": "standard", "keep": "bytes", "threads": False, "grouped": False},
    fault=(overtake, {"rows": (1, 2), "where": 0, "cut": None, "later": "before"}),
    payload=False,
)
def test_a_request_without_its_neighbours_is_judged_weaker_and_never_otherwise(
    plan: Any,
    lifo: bool,
    how: dict[str, Any],
    fault: tuple[Callable[..., Any], dict[str, Any]],
    payload: bool,
) -> None:
    story, numbers = fault
    with folder() as path:
        hit = Hit(path, plan, lifo, how)
        story(hit, **numbers)
        hit.history.play(hit.after)
        hit.scene.close()
        whole = judged(hit.scene.paths)
        out = path / "trimmed.h5"
        done = trim(hit.scene.paths, out, Scope(rooms=frozenset({ROOM})), alone=True, payload=payload)
        part = judged([out])
        before = {(f.code, f.stage, f.layer): f for f in whole.findings}
        for finding in part.findings:
            if finding.code == "unclassified":
                assert finding.layer in {layer for _, _, layer in before}
                continue
            was = before[finding.code, finding.stage, finding.layer]
            assert RANK[finding.confidence] <= RANK[was.confidence]
        if whole.findings or done.lost:
            assert part.verdict != "clean"


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("story", [STORIES["S1"], STORIES["S2"]], ids=["S1", "S2"])
def test_sides_trimmed_together_and_merged_in_any_order_are_judged_alike(
    tmp_path: Path, story: Callable[[Scene], Scene], backward: bool
) -> None:
    scene = story(Scene(tmp_path, split=True, layers=(0, 2)))
    scene.close()
    whole = judged(scene.paths)
    scope = Scope(layers=frozenset({2}))
    paths = scene.paths[::-1] if backward else scene.paths
    trim(paths, tmp_path / "trimmed.h5", scope)
    merge(paths, tmp_path / "merged.h5")
    trim([tmp_path / "merged.h5"], tmp_path / "other.h5", scope)
    one, other = judged([tmp_path / "trimmed.h5"]), judged([tmp_path / "other.h5"])
    assert told(one.findings) == told(other.findings) == told(scope.limit(whole.findings)[0])
    assert one.verdict == other.verdict == whole.verdict


def test_the_stage_of_the_finding_cut_away_leaves_no_other_accusation(tmp_path: Path) -> None:
    for number, name in enumerate(("S1", "S2", "S9")):
        story = STORIES[name]
        (tmp_path / name).mkdir()
        scene = story(Scene(tmp_path / name))
        scene.close()
        guilty = {finding.stage for finding in judged(scene.paths).findings}
        for stage in ("store", "wire", *sorted(guilty)):
            out = tmp_path / name / f"{number}-{stage}.h5"
            trim(scene.paths, out, Scope(stages=frozenset({stage})))
            part = judged([out])
            assert {finding.stage for finding in part.findings} == guilty & {stage}
            assert set(part.cleared) <= {stage}
            assert part.scope["cut_to"] == {"stages": [stage]}


def test_a_donor_that_no_transfer_leads_to_is_kept(tmp_path: Path) -> None:
    """Rows of a request that had nothing to do with the page, found there at the read."""
    scene = Scene(tmp_path, layers=(0, 1))
    donor = scene.healthy(Job(7005, 5, 192, [31, 32, 33], [11, 12, 13]))
    ours = scene.healthy(Job(7000, 0, 192, [21, 22, 23], [5, 6, 7]))
    scene.decode.memory[1][6] = scene.decode.memory[1][donor.decode[2]]
    scene.look("LT", ours)
    scene.read(ours)
    scene.close()
    done = trim(scene.paths, tmp_path / "out.h5", Scope(rooms=frozenset({7000})))
    assert done.requests == 2
    with open_trace(tmp_path / "out.h5") as trace:
        table = trace.table("snapshot")
        kept = [
            table.ragged("pages")[row].tolist() for row in range(len(table)) if table["room"][row] == 7005
        ]
        assert [13] in kept
        assert not any(11 in looked for looked in kept)
