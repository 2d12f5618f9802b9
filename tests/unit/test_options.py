from __future__ import annotations

from pathlib import Path

import pytest

from capture_hooks.options import BY_ENV, OPTIONS, TAPS, Options, parse_size


def test_an_empty_environment_gives_the_declared_defaults() -> None:
    options, warnings = Options.from_environ({"PATH": "/bin", "KV_OTHER": "1"})
    assert options == Options()
    assert warnings == []
    assert options.capture is None


def test_every_field_has_one_variable_and_a_help_text() -> None:
    assert len(BY_ENV) == len(OPTIONS)
    for option in OPTIONS:
        assert option.env == "KV_REPLAY_" + option.name.upper()
        assert option.help
        assert getattr(Options(), option.name) == option.default


def test_a_shown_value_parses_back_to_itself() -> None:
    for option in OPTIONS:
        assert option.parse(option.show(option.default)) == option.default


def test_values_are_parsed_by_type() -> None:
    options, warnings = Options.from_environ(
        {
            "KV_REPLAY_CAPTURE": "/x/y",
            "KV_REPLAY_MODE": "Full",
            "KV_REPLAY_RING_SECONDS": "1.5",
            "KV_REPLAY_DISK_LIMIT": "4GB",
            "KV_REPLAY_QUEUE": "10",
            "KV_REPLAY_TAPS": "read, store",
            "KV_REPLAY_SEAL": "0",
        }
    )
    assert warnings == []
    assert options.capture == Path("/x/y")
    assert options.mode == "full"
    assert options.ring_seconds == 1.5
    assert options.disk_limit == 4 * 10**9
    assert options.queue == 10
    assert options.taps == ("store", "read")
    assert options.tap("read")
    assert not options.tap("send")
    assert options.seal is False


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1048576", 2**20),
        ("4GB", 4 * 10**9),
        ("4GiB", 4 * 2**30),
        ("4g", 4 * 2**30),
        ("1.5 MiB", 3 * 2**19),
        ("2kb", 2000),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "4 XB", "0", "1e5", "4iB", "9" * 40, "nan"])
def test_wrong_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_size(text)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("KV_REPLAY_RING_SECONDS", "a number of seconds from 0 on"),
        ("KV_REPLAY_STORE_EVERY", "a whole number from 1 on"),
    ],
)
@pytest.mark.parametrize("text", ["many", "-1", "nan"])
def test_a_value_of_another_kind_is_told_in_words(name: str, expected: str, text: str) -> None:
    options, warnings = Options.from_environ({name: text})
    assert options == Options()
    (warning,) = warnings
    assert f"expected {expected}" in warning


def test_an_unknown_name_warns_with_the_nearest_right_one() -> None:
    options, warnings = Options.from_environ({"KV_REPLAY_RING_SECOND": "3"})
    assert options == Options()
    assert warnings == [
        "unknown option KV_REPLAY_RING_SECOND is ignored; did you mean KV_REPLAY_RING_SECONDS?"
    ]


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ("KV_REPLAY_MODE", "everything"),
        ("KV_REPLAY_QUEUE", "0"),
        ("KV_REPLAY_QUEUE", "many"),
        ("KV_REPLAY_RING_SECONDS", "nan"),
        ("KV_REPLAY_DISK_LIMIT", "lots"),
        ("KV_REPLAY_TAPS", "reed"),
        ("KV_REPLAY_SEAL", "perhaps"),
    ],
)
def test_a_bad_value_warns_and_leaves_the_default(env: str, text: str) -> None:
    options, warnings = Options.from_environ({env: text})
    assert options == Options()
    assert len(warnings) == 1
    assert warnings[0].startswith(f"{env}={text!r}: ")


@pytest.mark.parametrize(("text", "taps"), [("", TAPS), ("all", TAPS), ("none", ()), ("read", ("read",))])
def test_taps(text: str, taps: tuple[str, ...]) -> None:
    options, warnings = Options.from_environ({"KV_REPLAY_TAPS": text})
    assert (options.taps, warnings) == (taps, [])


def test_the_trace_header_holds_no_path() -> None:
    public = Options(capture=Path("/home/somebody")).public()
    assert "capture" not in public
    assert "somebody" not in str(public)
    assert public["mode"] == "pages"
    assert public["taps"] == list(TAPS)
