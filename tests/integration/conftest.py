"""What several modules of tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration import sglang_pair


@pytest.fixture(scope="session")
def host() -> Iterator[sglang_pair.Host]:
    """The process that has SGLang 0.5.23 imported: every pair is forked from it."""
    with sglang_pair.Host("0.5.23") as running:
        yield running
