"""What several modules of tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration import sglang_pair
from tests.integration.nixl_fakes import Agent, Recording


@pytest.fixture(scope="session")
def host() -> Iterator[sglang_pair.Host]:
    """The process that has SGLang 0.5.23 imported: every pair is forked from it."""
    with sglang_pair.Host("0.5.23") as running:
        yield running


@pytest.fixture
def agent_class() -> type[Agent]:
    """A fresh class for each test: wrappers go onto classes."""
    return type(
        "FreshAgent", (Agent,), {name: value for name, value in vars(Agent).items() if callable(value)}
    )


@pytest.fixture
def recording(tmp_path: Path, agent_class: type[Agent]) -> Iterator[Recording]:
    found = Recording(tmp_path, agent_class)
    yield found
    found.adapter.uninstall()
    found.recorder.close()
