"""A story as one HTML file that needs nothing else: no script, no network, pictures inside."""

from __future__ import annotations

from importlib import resources

from jinja2 import Environment, StrictUndefined

from analysis.plots import inline_svg
from analysis.story import PAGE_HEADS, Story
from replay.words import counted

_TEMPLATE = "report.html.j2"


def report_html(story: Story) -> str:
    """``story`` as HTML. Everything in it is escaped; only our own pictures go in as they are."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    text = (resources.files("analysis") / "templates" / _TEMPLATE).read_text(encoding="utf-8")
    svgs = {picture.kind: inline_svg(picture.figure, picture.kind) for picture in story.pictures}
    return environment.from_string(text).render(
        story=story, svgs=svgs, page_heads=PAGE_HEADS, counted=counted
    )
