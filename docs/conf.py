"""How Sphinx builds the site: ``make docs``.

Sphinx with MyST, because it checks links between Markdown pages that read well on GitHub, down to the heading.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "kv-replay"
copyright = "the kv-replay authors, Apache-2.0"
html_title = "kv-replay"

# The source folder is the root of the repository, so that every relative link is the same on GitHub and in the site.
root_doc = "docs/index"
include_patterns = ["README.md", "CHANGELOG.md", "docs/**.md", "replay/trace/SPEC.md"]
exclude_patterns = [".*", "**/.*", "**/__pycache__", "build", "demo", "dist", "tests"]

extensions = ["myst_parser"]
myst_heading_anchors = 4  # headings get the anchors that GitHub gives them
highlight_language = "none"

html_theme = "furo"  # light and dark, no script or font from the network
html_additional_pages = {"index": "start.html"}
templates_path = ["_templates"]
html_static_path: list[str] = []
html_copy_source = False
html_show_sphinx = False
html_use_index = False
pygments_style = "default"
pygments_dark_style = "github-dark"


def add_navigation(_: Sphinx, page: str, source: list[str]) -> None:
    """Make the lists of links in the index the navigation of the site, and those of the kinds page the kinds'.

    A page that is in neither has no place in the site: Sphinx warns, and the build fails.
    """
    if page not in (root_doc, "docs/kinds"):
        return
    for section in re.split(r"^#+ ", source[0], flags=re.MULTILINE)[1:]:
        links = re.findall(r"^(?:- |\| )\[[^\]]*\]\(([^)#\s]+\.md)\)", section, re.MULTILINE)
        entries = "\n".join(f"/{link[3:]}" if link.startswith("../") else link for link in links)
        tree = f"\n```{{toctree}}\n:hidden:\n:caption: {section.splitlines()[0]}\n\n{entries}\n```\n"
        source[0] += tree if links else ""


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", add_navigation)
