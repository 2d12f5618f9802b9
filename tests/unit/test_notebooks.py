"""The notebooks run from top to bottom."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from replay.judge import JudgeOptions, judge
from replay.trace.reader import open_trace
from tests.scenarios.scene import Scene
from tests.scenarios.test_s2_late_foreign_write import overtaken

ROOT = Path(__file__).parents[2]
STALE = "run 'make notebooks', or .venv/bin/python notebooks/render.py"

_spec = importlib.util.spec_from_file_location("render", ROOT / "notebooks/render.py")
assert _spec is not None
assert _spec.loader is not None
render = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(render)


def test_a_trace_can_be_looked_at_in_a_notebook(tmp_path: Path) -> None:
    scene = overtaken(Scene(tmp_path, layers=(2, 6)))
    scene.close()
    env = {**os.environ, "TRACE": str(scene.paths[0]), "OUT": str(tmp_path), "PYTHONPATH": str(ROOT)}

    done = subprocess.run(
        [sys.executable, str(ROOT / "notebooks/look_at_a_trace.py")],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    assert "DIVERGENT  destination: late foreign write (F14)" in done.stdout
    # Reception showed the right bytes, and what was there before it is nobody's look.
    assert "8182 of 8448 bytes of RD differ" in done.stdout
    assert "rows whose values differ: [0, 1, 2," in done.stdout
    assert (tmp_path / "stages.png").stat().st_size > 1000


def run(script: str, folder: Path, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "notebooks" / script), *args],
        env={**os.environ, "OUT": str(folder), "PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_the_tour_runs_on_the_trace_that_comes_with_it(tmp_path: Path) -> None:
    told = run("tour.py", tmp_path)
    assert told == printed("tour"), STALE

    assert "DIVERGENT  completion: completion early (F09), certain" in told
    assert "bytes differ between store and arrival" in told
    assert told.index("status heard (12.0)") < told.index("transfer 120 done")
    for name in ("tour-grid.png", "tour-bytes.png", "tour-ownership.png"):
        assert (tmp_path / name).stat().st_size > 1000


def test_the_tours_trace_is_small_and_what_its_script_writes(tmp_path: Path) -> None:
    shipped = ROOT / "notebooks/tour.h5"
    assert shipped.stat().st_size < 300_000
    run("make_tour_trace.py", tmp_path, str(tmp_path / "tour.h5"))

    with open_trace(shipped) as old, open_trace(tmp_path / "tour.h5") as new:
        assert judge(old, JudgeOptions(reexecute=False)) == judge(new, JudgeOptions(reexecute=False))
        assert old.contents.digests.tolist() == new.contents.digests.tolist()


def printed(name: str) -> str:
    """What the rendered notebook shows as printed."""
    made = json.loads((ROOT / f"notebooks/{name}.ipynb").read_text())
    outputs = [output for cell in made["cells"] for output in cell.get("outputs", ())]
    return "".join("".join(output["text"]) for output in outputs if output["output_type"] == "stream")


@pytest.mark.parametrize("name", render.NAMES)
def test_a_rendered_notebook_has_the_cells_of_its_source_and_its_pictures(name: str) -> None:
    shipped = json.loads((ROOT / f"notebooks/{name}.ipynb").read_text())
    drawn = 0
    for cell in shipped["cells"]:
        for output in cell.get("outputs", ()):
            drawn += "image/png" in output.get("data", ())
        if cell["cell_type"] == "code":
            cell["outputs"] = []
    assert shipped == render.notebook(name, {}), STALE
    assert drawn >= 2


def pictures(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.png") if path.stat().st_size > 1000}


def test_the_bf16_story_is_true_of_a_run_of_its_own(tmp_path: Path) -> None:
    told = run("bf16_story.py", tmp_path)  # what it claims, it asserts

    assert "60 at a time\nDIVERGENT  destination: late foreign write (F14)" in told
    assert pictures(tmp_path) == {f"bf16-{name}.png" for name in ("rates", "grid", "bytes", "ownership")}


def test_the_read_kernels_are_judged_on_made_up_and_on_captured_caches(tmp_path: Path) -> None:
    told = run("read_kernels.py", tmp_path)

    assert "CLEAN  every judged rung agrees" in told
    assert "DIVERGENT  read-kernel: wrong stride (F20), certain" in told
    assert pictures(tmp_path) == {"read-errors.png", "read-own-kernel.png"}


def test_an_engine_of_ones_own_is_recorded_to_a_clean_verdict_and_to_its_fault(tmp_path: Path) -> None:
    told = run("record_an_engine.py", tmp_path)
    assert told == printed("record_an_engine"), STALE

    assert "CLEAN  every judged rung agrees" in told
    assert "DIVERGENT  completion: completion early (F09), certain" in told
    assert pictures(tmp_path) == {"engine-grid.png", "engine-bytes.png"}
