"""The import arrows of the house, and what may never appear in the project's files."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("capture_hooks", "replay", "analysis")
#: What the part inside the server may import at all.
SERVER_IMPORTS = {"capture_hooks", "numpy", "torch", "triton", "zstandard", "xxhash"}
#: Transports and engines that an adapter wraps where they are installed.
ADAPTED = {"nixl", "nixl_cu12", "nixl_cu13", "mooncake", "sglang", "vllm"}


def modules(*packages: str) -> list[Path]:
    return sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))


def imported(tree: ast.AST) -> set[str]:
    """First names of everything that ``tree`` imports, at its top or inside functions."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.partition(".")[0])
    return names


def imports_of(path: Path, known: dict[str, Path]) -> set[str]:
    """The project's own modules that ``path`` imports, at its top, inside functions, or for its types."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in known else node.module)
    return found & set(known)


def test_no_module_imports_itself_by_way_of_others() -> None:
    known = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in modules(*PACKAGES)
    }
    left = {name: imports_of(path, known) - {name} for name, path in known.items()}
    while free := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in free:
            del left[name]

    # What imports a circle is left over as well; what is imported by nothing left is not part of one.
    while outer := [name for name in left if not any(name in needs for needs in left.values())]:
        for name in outer:
            del left[name]
    assert left == {}


def test_the_import_contracts_hold() -> None:
    code = "from importlinter.cli import lint_imports_command as lint; lint()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", modules("capture_hooks"), ids=lambda path: str(path.relative_to(ROOT)))
def test_what_runs_in_the_server_imports_only_what_is_agreed(path: Path) -> None:
    allowed = SERVER_IMPORTS | set(sys.stdlib_module_names)
    if "adapters" in path.parts:
        allowed |= ADAPTED

    assert imported(ast.parse(path.read_text())) <= allowed


@pytest.mark.parametrize(
    ("module", "slow"),
    [
        ("capture_hooks", ("torch", "triton", "h5py", "click")),
        ("capture_hooks.recorder", ("torch", "triton", "h5py", "click")),
        ("replay.trace.reader", ("torch", "triton", "matplotlib")),
        ("replay.judge", ("torch", "triton", "matplotlib")),
        ("analysis.report", ("torch", "triton", "matplotlib", "h5py")),
        ("analysis.diff", ("torch", "triton", "matplotlib")),
    ],
)
def test_an_import_loads_nothing_slow(module: str, slow: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print([name for name in {slow!r} if name in sys.modules])"

    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("path", modules(*PACKAGES), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_can_run_code_from_a_file(path: Path) -> None:
    tree = ast.parse(path.read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]

    assert not imported(tree) & {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
    assert not {ast.unparse(call.func) for call in calls} & {"eval", "exec", "torch.load", "yaml.load"}
    for call in calls:
        if ast.unparse(call.func) in ("np.load", "numpy.load"):
            assert "allow_pickle=False" in [
                ast.unparse(keyword).replace(" ", "") for keyword in call.keywords
            ]


def test_no_registry_host_is_named() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    names = [name for name in listed.stdout.split("\0") if name] or [
        "Makefile",
        "constraints.txt",
        "pyproject.toml",
    ]
    host = re.compile(r"--(extra-)?index-url|\b(files\.pythonhosted|pypi\.org|download\.pytorch)\b")

    found = [
        name
        for name in names
        if (ROOT / name).is_file()
        and Path(__file__) != ROOT / name
        and host.search((ROOT / name).read_text(errors="replace"))
    ]

    assert found == []


def test_the_pins_carry_no_local_versions_or_paths() -> None:
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]

    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][A-Za-z0-9.]*", pin) for pin in pins), pins
    assert "torch==2.13.0" in pins
