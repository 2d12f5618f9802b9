"""The notebooks run from top to bottom."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.scenarios.scene import Scene
from tests.scenarios.test_s2_late_foreign_write import overtaken

ROOT = Path(__file__).parents[2]


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
    assert "of 8448 bytes differ" in done.stdout
    assert (tmp_path / "stages.png").stat().st_size > 1000
