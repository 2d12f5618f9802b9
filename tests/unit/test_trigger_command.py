"""``replay trigger``: the file that running captures look for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from capture_hooks.control import Control
from capture_hooks.rid import rid_hash
from replay import cli


def test_a_capture_understands_what_the_command_writes(tmp_path: Path) -> None:
    control = Control(tmp_path)

    assert (
        cli.run(["trigger", str(tmp_path), "--room", "7719.2", "--rid", "chat-1", "--reason", "salad"]) == 0
    )

    (trigger,) = control.poll()
    assert (trigger.room, trigger.attempt, trigger.rid, trigger.reason) == (
        7719,
        2,
        rid_hash("chat-1"),
        "salad",
    )
    assert control.poll() == []


def test_the_request_id_itself_is_not_written(tmp_path: Path) -> None:
    cli.run(["trigger", str(tmp_path), "--rid", "alice@example.org/4711"])

    (path,) = tmp_path.iterdir()
    assert re.fullmatch(r"trigger-[0-9a-f]{16}\.json", path.name)
    assert "alice" not in path.read_text()
    assert json.loads(path.read_text()).keys() == {"reason", "rid_hash"}


def test_each_trigger_is_a_file_of_its_own(tmp_path: Path) -> None:
    for _ in range(3):
        cli.run(["trigger", str(tmp_path), "--room", "1"])

    assert len(list(tmp_path.glob("trigger-*.json"))) == 3


def test_a_folder_without_a_journal_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.run(["trigger", str(tmp_path), "--room", "1"])
    assert "no journal" in capsys.readouterr().err

    (tmp_path / "decode-0-ab.journal").touch()
    cli.run(["trigger", str(tmp_path), "--room", "1"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("args", [[], ["--room", "x"], ["--rid", ""]])
def test_a_request_must_be_named(args: list[str], tmp_path: Path) -> None:
    assert cli.run(["trigger", str(tmp_path), *args]) == 2
    assert list(tmp_path.iterdir()) == []


def test_the_folder_must_exist(tmp_path: Path) -> None:
    assert cli.run(["trigger", str(tmp_path / "no"), "--room", "1"]) == 2
