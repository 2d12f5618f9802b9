"""Every function that the plug-in hooks, in each version of SGLang: it is there, takes what its hook
needs, and is patched.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from capture_hooks.adapters.sglang.store import OTHERS
from tests.integration import sglang_pair

SCRIPT = Path(__file__).with_name("sglang_targets.py")

pytestmark = pytest.mark.timeout(600)

#: Of 0.5.23 alone: statuses and acknowledgements that 0.5.16 does not send over NIXL, and its later checks.
NEWER = {
    "CommonKVManager._send_abort_ack",
    "CommonKVManager.apply_prefill_status",
    "CommonKVManager.conclude_transfer",
    "CommonKVManager.note_abort_ack",
    "CommonKVManager.send_kv_status_message",
    "DecodeTransferQueue._defer_release",
    "DecodeTransferQueue._do_release",
    "NixlKVManager._await_handles",
    "ReqToTokenPool.alloc_rows",
    "SchedulerDisaggregationDecodeMixin._handle_kv_checksum_mismatch",
    "SchedulerDisaggregationDecodeMixin._verify_kv_checksums",
    "read_gathered_torch",
    "setter_index_k_norm_rope_pack_store",
    "setter_index_k_rope_pack",
}

#: Of 0.5.16 alone: it hands rows out in ``alloc`` itself.
OLDER = {"ReqToTokenPool.alloc"}


@pytest.fixture(scope="module", params=["0.5.23", "0.5.16"])
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    version = request.param
    if why := sglang_pair.why_not(version):
        pytest.skip(why)
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env=sglang_pair.environment(version),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout[done.stdout.index("JSON") + 4 :])
    assert result["layout"] == [version, version, ""]
    return result


def test_every_target_is_there(found: dict[str, Any]) -> None:
    """A problem here is a function that was renamed or moved, or that takes other arguments."""
    left = [p for p in found["problems"] if p.partition(":")[0] not in found["optional"]]
    assert left == []
    gone = {name for name, place in found["targets"].items() if place is None}
    assert gone == (OLDER if found["layout"][1] == "0.5.23" else NEWER)


@pytest.mark.parametrize("role", ["prefill", "decode", "server"])
def test_every_target_is_patched_and_none_is_passed_by(found: dict[str, Any], role: str) -> None:
    patched = found["roles"][role]
    assert {(h["state"], h["complete"], h["note"]) for h in patched["hooks"].values()} == {
        ("attached", True, "")
    }
    count = len(patched["hooks"])
    assert patched["wrapped"] == count
    assert patched["summary"] == f"attached {count} of {count} hooks, 0 fired"
    assert patched["left"] == [], "the very same functions are put back"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_rows_of_the_request_table_are_counted_as_the_table_counts_them(
    found: dict[str, Any], role: str
) -> None:
    """Three requests fill the table, a fourth gets nothing, then one row goes on to two others in turn."""
    told = found["rows"][role]["told"]
    assert [generation for _, generation, _ in told] == [0, 0, 0, -1, 0, 1, 0, 2]
    assert [own for _, _, own in told] == [generation for _, generation, _ in told]
    (a, b, c, none, *again) = [row for row, _, _ in told]
    assert len({a, b, c}) == 3
    assert none == -1
    assert again == [a, b, a, b]
    name = "DecodeReqToTokenPool.alloc" if role == "decode" else "ReqToTokenPool.alloc"
    name += "_rows" if role == "prefill" and found["layout"][1] == "0.5.23" else ""
    assert found["rows"][role]["fired"] == [f"sglang.{name}"]


def test_a_reference_that_passes_a_hook_by_is_found(found: dict[str, Any]) -> None:
    assert found["held"]["state"] == "attached"
    assert not found["held"]["complete"]
    assert "holds the original" in found["held"]["note"]


def test_no_target_can_go_unnoticed(found: dict[str, Any]) -> None:
    assert found["unnoticed"] == []


def test_a_function_that_is_replaced_while_the_server_runs_is_told(found: dict[str, Any]) -> None:
    told = found["passed_by"]
    assert told["before"]
    assert told["told"] == {
        "sglang.NixlKVManager.send_kvcache": [False, "the function was replaced after it was hooked"],
        "sglang.FastQueue.get": [True, ""],
    }


def test_arguments_that_bring_other_writers_are_there(found: dict[str, Any]) -> None:
    later = {"enable_nvidia_megakernel", "enable_unified_cache_external_linker"}
    newer = later if found["layout"][1] == "0.5.16" else set()
    assert set(OTHERS) - set(found["arguments"]) == newer


def test_a_renamed_function_is_noticed(found: dict[str, Any]) -> None:
    renamed = found["renamed"]
    problems = {p.partition(":")[0] for p in renamed["problems"]} - set(found["optional"])
    assert problems == {"NixlKVManager.send_kvcache"}
    hook = renamed["prefill"]["hooks"]["sglang.NixlKVManager.send_kvcache"]
    assert (hook["state"], hook["complete"], hook["covers"]) == ("missing", False, "send")
    count = len(found["roles"]["prefill"]["hooks"])
    assert renamed["prefill"]["summary"] == (
        f"attached {count - 1} of {count} hooks, 0 fired; not covered: sglang.NixlKVManager.send_kvcache is missing"
    )


def test_an_unknown_version_is_probed(found: dict[str, Any]) -> None:
    version = found["layout"][1]
    assert found["unknown"] == [version, f"SGLang 9.9.9 is not known; its code has the layout of {version}"]
    layout, sentence = found["renamed"]["unknown"]
    assert layout == ""
    assert "SGLang 9.9.9 is not known and its code has another layout" in sentence
    assert sentence.endswith("nothing is recorded")


def test_without_the_variable_nothing_is_touched(found: dict[str, Any]) -> None:
    """SGLang finds the entry point and calls it; every function of every module stays what it was."""
    off = found["off"]
    assert off["entries"] == ["capture_hooks.adapters.sglang:register"]
    assert off["changed"] == []
    assert off["hooks"] == 0
    assert off["finders"]
    assert off["modules"] == ["capture_hooks", "capture_hooks.adapters", "capture_hooks.adapters.sglang"]
