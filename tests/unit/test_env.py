"""``replay env`` and the options page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from capture_hooks.options import OPTIONS
from replay import cli
from replay.commands.env import markdown_table

ROOT = Path(__file__).parents[2]


def test_the_options_page_is_current() -> None:
    assert (ROOT / "docs/options.md").read_text() == markdown_table(), "run 'make docs'"


def test_every_option_is_listed_with_its_value(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KV_REPLAY_MODE", "full")

    assert cli.run(["env"]) == 0

    out = capsys.readouterr().out
    assert "KV_REPLAY_MODE=full  (default pages)" in out
    assert [line for line in out.splitlines() if line.startswith(tuple(f"{o.env}=" for o in OPTIONS))]
    assert sum(line.startswith("KV_REPLAY_") for line in out.splitlines()) == len(OPTIONS)


def test_an_unknown_name_is_warned_of_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KV_REPLAY_MODES", "full")

    cli.run(["env"])

    assert "KV_REPLAY_MODES is ignored; did you mean KV_REPLAY_MODE?" in capsys.readouterr().err


def test_json_holds_values_types_and_warnings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KV_REPLAY_QUEUE", "many")
    monkeypatch.setenv("KV_REPLAY_CAPTURE", "/somewhere")

    cli.run(["env", "--json"])

    out, err = capsys.readouterr()
    body = json.loads(out)
    found = {option["env"]: option for option in body["options"]}
    assert body["schema"] == "kv-replay/env/1"
    assert found["KV_REPLAY_CAPTURE"]["value"] == "/somewhere"
    assert found["KV_REPLAY_CAPTURE"]["set"] is True
    assert found["KV_REPLAY_MODE"]["set"] is False
    assert len(body["warnings"]) == 1
    assert err == ""
