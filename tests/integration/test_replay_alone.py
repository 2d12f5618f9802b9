"""The replayer works from the trace alone: a fresh process, an empty folder, nothing of the lab."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from replay.lab.forced import forced
from replay.lab.run import Pair
from replay.trace.merge import merge

RUN = """
import sys
from replay.cli import main
try:
    main()
finally:
    assert not [name for name in sys.modules if name.startswith("replay.lab")], "the replayer knows the lab"
"""


def test_a_merged_trace_is_judged_in_an_empty_folder_by_a_fresh_process(tmp_path: Path) -> None:
    flags, capture, empty = tmp_path / "flags", tmp_path / "capture", tmp_path / "empty"
    flags.mkdir()
    empty.mkdir()
    wanted = forced("sent-before-written", "fp8", 0, flags)
    with Pair() as pair:
        pair.run(wanted.config, capture, {"KV_REPLAY_MODE": "full", "KV_REPLAY_SEAL": "0"})
    merge([capture], tmp_path / "merged.h5")
    shutil.move(tmp_path / "merged.h5", empty / "trace.h5")
    shutil.rmtree(capture)
    shutil.rmtree(flags)
    done = subprocess.run(
        [sys.executable, "-c", RUN, "trace.h5", "--json", "--sample", "1"],
        cwd=empty,
        env={name: value for name, value in os.environ.items() if not name.startswith("KV_REPLAY")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert not done.stderr
    verdict = json.loads(done.stdout)
    assert {finding["code"] for finding in verdict["findings"]} == {"F10"}
    assert {finding["request"]["room"] for finding in verdict["findings"]} == {wanted.room}
    assert verdict["scope"]["triton"]["stores"] == 1
    assert sorted(path.name for path in empty.iterdir()) == ["trace.h5"]
