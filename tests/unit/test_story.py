"""The report as HTML and as Markdown: complete, self-contained, and deaf to what a trace says in its names."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from analysis.html import report_html
from analysis.markdown import LIMIT, fenced, report_markdown
from analysis.story import Story, tell
from replay import cli
from replay.judge import JudgeOptions, judge
from replay.trace.reader import open_trace
from replay.verdict import STAGES
from tests.golden_texts import check
from tests.scenarios import pattern
from tests.scenarios.planted import planted_scene
from tests.scenarios.scene import Job, Scene
from tests.scenarios.test_s2_late_foreign_write import overtaken

EVIL = (
    "<script>alert(1)</script><img src='http://evil.example/x' onerror=alert(1)>\"> ```\n# @you "
    "[x](http://evil.example) $x$ \x1b[31m"
)


def story_of(path: Path) -> Story:
    with open_trace(path) as trace:
        return tell(trace, judge(trace, JudgeOptions(reexecute=False)))


def write(folder: Path) -> Path:
    """S2 in two layers, with one read whose logits were kept."""
    scene = overtaken(Scene(folder, layers=(2, 6)), later="after")
    scene.read(Job(7001, 1, 256, [24, 25, 26, 27], [12, 13, 14, 15]), logits=True)
    scene.close()
    return scene.paths[0]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("story"))


@pytest.fixture(scope="module")
def story(path: Path) -> Story:
    return story_of(path)


@pytest.fixture(scope="module")
def html(story: Story) -> str:
    return report_html(story)


class Page(HTMLParser):
    """Everything of a page: its elements with their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in ("meta", "br", "img", "link", "input", "hr"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_every_rung_and_piece_of_evidence_is_told(story: Story, html: str) -> None:
    text = " ".join(Page(html).text.split())

    assert [rung.stage for rung in story.rungs] == list(STAGES)
    assert {rung.stage: rung.state for rung in story.rungs}["destination"] == "finding"
    assert {rung.stage: rung.state for rung in story.rungs}["wire"] == "clear"
    for part in (
        "destination: late foreign write (F14), certain",
        "room 7001 (decode rank 0), index_k, 2 layers (2, 6)",
        "they hold room 7000's pages 0..1",
        "room 7000, layer 2, logical page 0",
        "[0,8448)",
        f"{int((pattern.page(1, 2, 2) != pattern.page(0, 2, 0)).sum()):,}",
        "replay timeline trace.h5 --page index_k/2/14 --process 1",
        "prefill rank 0",
        "index_k: 2 layers, 48 pages, format fp8, pitch 8,448, item length 8,448",
    ):
        assert part in text, part
    assert [picture.kind for picture in story.pictures] == ["grid", "bytes", "rows", "ownership", "logits"]
    assert len(story.timelines) == 2


def test_the_page_is_well_formed_and_needs_nothing_from_outside(html: str) -> None:
    page = Page(html)

    assert page.open == []
    policy = [a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]
    assert {"script", "link", "iframe", "object", "form"}.isdisjoint(tag for tag, _ in page.elements)
    for tag, attributes in page.elements:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "xlink:href", "data", "action"):
                assert value.startswith(("#", "data:image/png;base64,")), (tag, name, value[:80])
    assert not re.search(r"url\((?!#)|@import", html)
    names = re.findall(r"""https?://[^\s"'<>]+""", html)
    assert {name.split("/")[2] for name in names} <= {"www.w3.org"}, "names of XML, which nobody fetches"


def test_every_picture_is_there_and_decodes(html: str) -> None:
    from PIL import Image

    page = Page(html)
    assert sum(tag == "svg" for tag, _ in page.elements) == 5
    raw = re.findall(r"data:image/png;base64,([A-Za-z0-9+/=\s]+)", html)
    assert raw
    for data in raw:
        with Image.open(io.BytesIO(base64.b64decode(data))) as image:
            image.load()
    ids = [a["id"] for _, a in page.elements if "id" in a]
    assert len(ids) == len(set(ids))


def test_the_page_has_colours_for_the_dark(html: str) -> None:
    light, dark = html.split("@media (prefers-color-scheme: dark)")[:2]

    used = set(re.findall(r"var\((--[a-z]+)", html))
    for style in (light, dark[: dark.index("* {")]):
        assert used <= set(re.findall(r"(--[a-z]+): #", style))


def test_names_in_a_trace_are_text_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene, _ = planted_scene(tmp_path, monkeypatch, lambda place: EVIL)
    scene.close()
    story = story_of(scene.paths[0])

    page = Page(report_html(story))
    assert page.open == []
    tags = {tag for tag, _ in page.elements}
    assert {"script", "img"}.isdisjoint(tags)
    assert "alert(1)" in page.text
    assert not any("onerror" in a for _, a in page.elements)
    assert "\x1b" not in page.text

    text = report_markdown(story)
    assert "\x1b" not in text
    outside = []
    fence = ""
    for line in text.splitlines():
        if not fence and (found := re.match(r"`{3,}", line)):
            fence = found.group()
        elif fence and line == fence:
            fence = ""
        elif not fence:
            outside.append(line)
    assert not fence
    assert "evil.example" not in "\n".join(outside)
    assert "<script" not in "\n".join(outside)
    assert "evil.example" in text


def test_a_fence_is_longer_than_any_in_its_text() -> None:
    assert fenced("a ```` b") == "`````text\na ```` b\n`````"


def test_markdown_fits_an_issue_however_long_the_story(story: Story) -> None:
    from dataclasses import replace

    long = replace(story, timelines=tuple((f"t{n}", "x" * 11_000) for n in range(20)))

    text = report_markdown(long)

    assert len(text) <= LIMIT
    assert "Left out for length: " in text
    assert text.rstrip().endswith("</sub>")


def test_a_clean_trace_has_a_report_too(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.healthy(Job(5, 0, 100, [1, 2], [3, 4]))
    scene.close()
    story = story_of(scene.paths[0])

    text = Page(report_html(story)).text
    assert "CLEAN" in text
    assert "Every rung within the scope was judged." in text
    assert "What was found" not in text
    assert story.kinds == ()


def test_golden(path: Path, renew_golden: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([str(path), "--no-reexecute"]) == 1
    check("verdict.txt", capsys.readouterr().out, renew_golden)
    assert cli.run([str(path), "--no-reexecute", "--verbose"]) == 1
    check("verdict-verbose.txt", capsys.readouterr().out, renew_golden)
    assert cli.run(["info", str(path)]) == 0
    check("info.txt", capsys.readouterr().out, renew_golden)
    assert cli.run(["report", str(path), "--markdown", "--no-reexecute"]) == 0
    check("report.md", capsys.readouterr().out, renew_golden)


def test_the_command_writes_one_file_and_never_over_another(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    args = ["report", str(path), "--no-reexecute"]

    assert cli.run([*args, "-o", str(out)]) == 0
    assert out.read_text().startswith("<!DOCTYPE html>")
    assert cli.run([*args, "-o", str(out)]) == 2
    assert cli.run([*args, "-o", str(out), "--force", "--request", "7000"]) == 0
    assert "room 7000" in out.read_text()
    assert cli.run([*args, "-o", str(tmp_path / "x.html"), "--request", "1"]) == 2
    assert cli.run(args) == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]


BROWSER = next(
    filter(
        None, map(shutil.which, ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"))
    ),
    None,
)
_ASK = """<script>
const copies = [...document.querySelectorAll("figure svg image")].map(picture => {
  const copy = document.createElement("img");
  copy.src = picture.href.baseVal;
  copy.style.display = "none";
  return document.body.appendChild(copy);
});
addEventListener("load", () => {
  const boxes = [...document.querySelectorAll("figure svg")].map(svg => svg.getBoundingClientRect());
  document.title = JSON.stringify({
    pictures: copies.length, decoded: copies.filter(copy => copy.complete && copy.naturalWidth > 0).length,
    widths: boxes.map(box => Math.round(box.width)), heights: boxes.map(box => Math.round(box.height)),
    paper: getComputedStyle(document.body).backgroundColor,
    across: document.documentElement.scrollWidth, view: innerWidth});
});</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here (Debian: chromium-headless-shell)")
@pytest.mark.parametrize(("scheme", "paper"), [(1, "rgb(255, 255, 255)"), (0, "rgb(20, 24, 31)")])
def test_a_browser_shows_all_of_it_and_asks_the_network_for_nothing(
    scheme: int, paper: str, html: str, tmp_path: Path
) -> None:
    """Our question to the page is a script, so the page under test is a copy without its policy."""
    page, log = tmp_path / "report.html", tmp_path / "net.json"
    asked = re.sub(r'<meta http-equiv="Content-Security-Policy".*?>', "", html)
    page.write_text(asked.replace("</body>", _ASK + "</body>"))
    assert BROWSER is not None

    done = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=900,900", "--dump-dom",
            f"--user-data-dir={tmp_path / 'profile'}", "--disable-component-update", "--no-first-run",
            f"--log-net-log={log}", f"--blink-settings=preferredColorScheme={scheme}",
            "--virtual-time-budget=10000", page.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip

    found = re.search(r"<title>(.*?)</title>", done.stdout)
    assert found is not None, done.stderr[-500:]
    said = json.loads(found.group(1))
    assert said["decoded"] == said["pictures"] > 0
    assert len(said["widths"]) == 5
    assert min(said["widths"]) > 300
    assert min(said["heights"]) > 100
    assert said["paper"] == paper
    assert said["across"] <= said["view"], "nothing sticks out to the right"
    urls = re.findall(r'"url":"([^"]+)"', log.read_text()) if log.exists() else []
    assert [url for url in urls if url.startswith("http") and "report" in url] == []
    assert "evil.example" not in " ".join(urls)
