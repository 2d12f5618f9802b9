"""`replay` on a trace: the exit code follows the verdict, and the JSON is the verdict."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from replay.verdict import EXIT_CLEAN, EXIT_DIVERGENT, EXIT_INCONCLUSIVE
from tests.scenarios.outcome import replay
from tests.scenarios.scene import Scene
from tests.scenarios.test_losses import STORIES, healthy_pair


def lossy_pair(scene: Scene) -> Scene:
    healthy_pair(scene)
    scene.decode.emit("loss", stage="queue", what="snapshot", count=1)
    return scene


@pytest.mark.parametrize("name", STORIES)
def test_divergent_is_exit_code_1_and_prints_the_finding(tmp_path: Path, name: str) -> None:
    story, how, code, _ = STORIES[name]
    scene = story(Scene(tmp_path, **how))
    scene.close()
    exit_code, told = replay(scene.paths)
    assert exit_code == EXIT_DIVERGENT == 1
    assert told["schema"] == "kv-replay/verdict/1"
    assert told["verdict"] == "divergent"
    (finding,) = told["findings"]
    assert finding["code"] == code
    assert finding["request"] == {"room": 7001 if name == "S2" else 7000, "attempt": 0, "aliases": []}
    assert finding["pages"]


@pytest.mark.parametrize(
    ("story", "exit_code", "verdict"),
    [(healthy_pair, EXIT_CLEAN, "clean"), (lossy_pair, EXIT_INCONCLUSIVE, "inconclusive")],
    ids=["clean", "lossy"],
)
@pytest.mark.parametrize("split", [False, True], ids=["one file", "two files"])
def test_clean_is_0_and_lossy_is_3(
    tmp_path: Path, story: Callable[[Scene], Scene], exit_code: int, verdict: str, split: bool
) -> None:
    scene = story(Scene(tmp_path, split=split))
    scene.close()
    code, told = replay(scene.paths)
    assert (code, told["verdict"], told["findings"]) == (exit_code, verdict, [])
    assert (EXIT_CLEAN, EXIT_INCONCLUSIVE) == (0, 3)


def test_a_folder_with_the_traces_of_both_sides_is_one_capture(tmp_path: Path) -> None:
    scene = healthy_pair(Scene(tmp_path, split=True))
    scene.close()
    code, told = replay([tmp_path])
    assert (code, told["verdict"]) == (0, "clean")


def test_one_side_alone_is_not_called_clean(tmp_path: Path) -> None:
    scene = healthy_pair(Scene(tmp_path, split=True))
    scene.close()
    for path in scene.paths:
        code, told = replay([path])
        assert told["findings"] == []
        assert (code, told["verdict"]) == (3, "inconclusive")
