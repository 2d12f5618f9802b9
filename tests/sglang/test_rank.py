"""The number of a process among those of its role, with stand-ins for what SGLang knows of its ranks."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from capture_hooks.adapters.sglang.plugin import _rank

SIZES = SimpleNamespace(tp_size=4, pp_size=2)


@pytest.mark.parametrize(
    ("parallel", "runner", "rank"),
    [
        ({"tp_rank": 0, "pp_rank": 0, "dp_rank": None}, None, 0),
        ({"tp_rank": 3, "pp_rank": 0, "dp_rank": None}, None, 3),
        ({"tp_rank": 3, "pp_rank": 1, "dp_rank": 2}, None, (2 * 2 + 1) * 4 + 3),
        ({"tp_rank": 3, "pp_rank": 1}, SimpleNamespace(ps=SimpleNamespace(dp_rank=2)), (2 * 2 + 1) * 4 + 3),
        ({"tp_rank": 3, "pp_rank": 1}, SimpleNamespace(ps=SimpleNamespace(dp_rank=None)), 7),
    ],
    ids=["alone", "tensor", "0.5.23", "0.5.16", "0.5.16 without replicas"],
)
def test_ranks_of_a_role_are_numbered(
    parallel: dict[str, Any], runner: Any, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("sglang", "sglang.srt", "sglang.srt.runtime_context"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    context: Any = sys.modules["sglang.srt.runtime_context"]
    context.get_parallel = lambda: SimpleNamespace(**parallel)
    assert _rank(SIZES, runner) == rank
