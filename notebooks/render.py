"""Runs notebooks and writes each with its output and pictures, for reading: ``NAME.py`` -> ``NAME.ipynb``.

    python notebooks/render.py [NAME ...]

Each runs in a process and an empty folder of its own. No Jupyter is needed.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
#: The notebooks that run by themselves.
NAMES = ("tour", "bf16_story", "read_kernels", "record_an_engine")
_ALONE = "--alone"


def cells(text: str) -> list[tuple[str, str]]:
    """("markdown" or "code", source) of each cell of a file with ``# %%`` cells."""
    found = []
    for part in re.split(r"^# %%", text, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        kind = "markdown" if "[markdown]" in head else "code"
        if kind == "markdown":
            body = re.sub(r"^# ?", "", body, flags=re.MULTILINE)
        found.append((kind, body.strip("\n")))
    return found


def notebook(name: str, outputs: dict[int, list[dict[str, Any]]]) -> dict[str, Any]:
    """Notebook ``name`` as JSON types (nbformat 4.5), with ``outputs`` by the number of the cell."""
    made = []
    for number, (kind, source) in enumerate(cells((HERE / f"{name}.py").read_text(encoding="utf-8"))):
        cell: dict[str, Any] = {
            "cell_type": kind,
            "id": f"cell-{number}",
            "metadata": {},
            "source": source.splitlines(keepends=True),
        }
        if kind == "code":
            cell |= {"execution_count": None, "outputs": outputs.get(number, [])}
        made.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": made,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def run(name: str, folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Run the cells of ``name`` in this process, with ``folder`` as ``OUT``; what each printed and drew."""
    os.environ["OUT"] = str(folder)
    path = HERE / f"{name}.py"
    space: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
    outputs: dict[int, list[dict[str, Any]]] = {}
    drawn: set[Path] = set()
    for number, (kind, source) in enumerate(cells(path.read_text(encoding="utf-8"))):
        if kind != "code":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(source, f"{path.name}, cell {number}", "exec"), space)  # noqa: S102  # our own scripts
        found: list[dict[str, Any]] = []
        if printed.getvalue():
            lines = printed.getvalue().splitlines(keepends=True)
            found.append({"name": "stdout", "output_type": "stream", "text": lines})
        fresh = sorted(set(folder.glob("*.png")) - drawn, key=lambda file: file.stat().st_mtime_ns)
        for picture in fresh:
            data = base64.b64encode(picture.read_bytes()).decode()
            found.append({"data": {"image/png": data}, "metadata": {}, "output_type": "display_data"})
        drawn |= set(fresh)
        outputs[number] = found
    return outputs


def main(names: list[str]) -> None:
    """Render ``names``, each in a process of its own."""
    if names[:1] == [_ALONE]:
        with tempfile.TemporaryDirectory() as folder:
            made = notebook(names[1], run(names[1], Path(folder)))
        (HERE / f"{names[1]}.ipynb").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
        return
    for name in names or NAMES:
        subprocess.run([sys.executable, str(HERE / "render.py"), _ALONE, name], check=True)
        print(f"wrote notebooks/{name}.ipynb")


if __name__ == "__main__":
    main(sys.argv[1:])
