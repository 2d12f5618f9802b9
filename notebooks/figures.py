"""How the notebooks show a picture: as a file, and in the notebook where there is one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.plots import save

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def show(figure: Figure, path: Path) -> None:
    """Write ``figure`` to ``path``, a PNG file, and display it in Jupyter."""
    save(figure, path)
    if "ipykernel" in sys.modules:
        from IPython.display import Image, display

        display(Image(filename=path))
