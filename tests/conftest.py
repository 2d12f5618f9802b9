"""What every test shares: one thread for each library, GPU tests skipped without a GPU, and the grouping for xdist."""

from __future__ import annotations

import os
import signal
from pathlib import Path

# Before torch or numpy is imported anywhere: the suite runs in two workers on two cores.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("MPLBACKEND", "Agg")
# Triton decides at its import, and whichever test imports it first decides for all: no GPU, then the interpreter.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A background job of a shell ignores Ctrl-C, and so would every command that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest  # noqa: E402  # after the environment
from hypothesis import HealthCheck, settings  # noqa: E402

TESTS = Path(__file__).parent
#: Tests that start processes of their own run in one xdist worker, and first: they must not compete for two cores.
PROCESS_FOLDERS = ("integration", "kill")

settings.register_profile(
    "suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--renew-golden", action="store_true", help="write tests/golden/ anew; read the diff")


@pytest.fixture
def renew_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--renew-golden"))


def _folder(item: pytest.Item) -> str:
    parts = item.path.relative_to(TESTS).parts if item.path.is_relative_to(TESTS) else ("",)
    return parts[0]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = _folder(item)
        if folder == "gpu":
            item.add_marker("gpu")
        if folder in PROCESS_FOLDERS and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group("processes"))
    items.sort(key=lambda item: _folder(item) not in PROCESS_FOLDERS)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not _has_gpu():
        pytest.skip("no CUDA device here")


def _has_gpu() -> bool:
    if not Path("/dev/nvidiactl").exists():
        return False  # without the import of torch, which takes seconds
    import torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True)
def _no_options_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own KV_REPLAY_* and colour settings decide nothing in a test."""
    for name in [name for name in os.environ if name.startswith("KV_REPLAY_")] + ["NO_COLOR"]:
        monkeypatch.delenv(name, raising=False)
