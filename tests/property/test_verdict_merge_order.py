"""The verdict depends neither on the order in which files are named nor on any clock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replay.verdict import Verdict
from tests.scenarios.outcome import verdict_of, verdict_of_paths
from tests.scenarios.scene import Scene
from tests.scenarios.test_losses import healthy_pair
from tests.scenarios.test_s1_completion_early import torn
from tests.scenarios.test_s2_late_foreign_write import overtaken
from tests.scenarios.test_s3_sent_before_written import too_early
from tests.scenarios.test_s9_torn_block_table import torn_table

STORIES = {
    "healthy": healthy_pair,
    "S1": torn,
    "S2": overtaken,
    "S3": too_early,
    "S9": torn_table,
}
HOUR = 3_600 * 10**9


def judged(verdict: Verdict) -> dict[str, Any]:
    """All of a verdict that is about the pages."""
    body = verdict.to_json()
    return {key: body[key] for key in ("verdict", "findings", "hazards", "cleared", "not_judged")}


def told(verdict: Verdict) -> list[tuple[Any, ...]]:
    return [(f.code, f.stage, f.confidence, f.request, f.layer, f.pages) for f in verdict.findings]


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_the_files_of_the_two_sides_may_be_named_in_any_order(
    tmp_path: Path, story: Callable[[Scene], Scene]
) -> None:
    scene = story(Scene(tmp_path, split=True))
    scene.close()
    forward = verdict_of_paths(scene.paths)
    backward = verdict_of_paths(scene.paths[::-1])
    assert judged(forward) == judged(backward)


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_one_file_of_both_sides_is_judged_as_two_files_are(
    tmp_path: Path, story: Callable[[Scene], Scene]
) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one = verdict_of(story(Scene(tmp_path / "one")))
    two = verdict_of(story(Scene(tmp_path / "two", split=True)))
    assert judged(one) == judged(two)


@pytest.mark.parametrize("skew", [-HOUR, -5_000_000, 5_000_000, HOUR])
@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_clocks_of_two_hosts_may_differ_by_anything(
    tmp_path: Path, story: Callable[[Scene], Scene], skew: int
) -> None:
    (tmp_path / "same").mkdir()
    (tmp_path / "other").mkdir()
    same = verdict_of(story(Scene(tmp_path / "same")))
    other = verdict_of(story(Scene(tmp_path / "other", skew_ns=skew)))
    assert other.verdict == same.verdict
    assert told(other) == told(same)
