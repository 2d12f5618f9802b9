from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from replay.classify import kernel_numerics


def asked(monkeypatch: pytest.MonkeyPatch, right: Any, seen: Any) -> Any:
    """A question of which every logit is wrong; the scales are all one."""
    monkeypatch.setattr(kernel_numerics, "_unscaled", lambda question: question.right)
    case = SimpleNamespace(logits=np.asarray(seen, np.float32))
    return SimpleNamespace(case=case, right=np.asarray(right, np.float64), wrong=np.ones(len(right), bool))


@pytest.mark.parametrize("count", [8, 11])
def test_a_few_rows_in_the_right_order_are_no_certainty(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    right = np.arange(count)
    assert not kernel_numerics.sure(asked(monkeypatch, right, right * 1.5))


@pytest.mark.parametrize("count", [12, 40, 400])
def test_rows_in_the_order_of_the_right_ones_are_certain(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    right = np.random.default_rng(count).normal(size=count)
    assert kernel_numerics.sure(asked(monkeypatch, right, right * 1.5 + 0.1))


def test_logits_of_other_keys_are_never_certain(monkeypatch: pytest.MonkeyPatch) -> None:
    """With heavy tails, as a few large scales make them."""
    rng = np.random.default_rng(7)
    for count in [12, 20, 40, 99, 400] * 40:
        right, seen = rng.standard_cauchy((2, count))
        assert not kernel_numerics.sure(asked(monkeypatch, right, seen)), count
