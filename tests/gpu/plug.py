"""What an installed distribution leaves beside its code: entry points, by which a plug-in is found."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GROUP = "sglang.srt.plugins"


def entry_points(folder: Path, name: str, lines: str) -> None:
    """A distribution ``name`` in ``folder`` that declares these entry points of SGLang's group."""
    info = folder / f"{name}-0.1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{lines}\n")


def kv_replay(folder: Path) -> None:
    """kv-replay's own entry points, as its project file declares them."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
    entry_points(folder, "kv_replay", "\n".join(f"{name} = {value}" for name, value in declared.items()))
