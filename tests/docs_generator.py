"""``docs/generate.py`` as a module: the folder of documents is no package."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_PATH = Path(__file__).parents[1] / "docs/generate.py"
_spec = importlib.util.spec_from_file_location("generate_docs", _PATH)
assert _spec is not None
assert _spec.loader is not None
generate = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(generate)
