"""A bundle: everything that a stranger needs to see a fault, and nothing that says whose it is.

The trace in it is cut down to the findings with the evidence for them (``replay.trim``) and rewritten by an
allow-list (``replay.scrub``). All else in the bundle is made from that copy, so no other text of the recording can
get there. A bundle proves itself: unpacked into an empty folder it must give the verdict that it encloses.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from analysis.bundle_text import replay_md
from analysis.cases import arrays_of, cases_of
from analysis.html import report_html
from analysis.story import tell
from replay.judge import judge
from replay.judge_options import JudgeOptions
from replay.scope import Scope
from replay.scrub import Scrub
from replay.trace.merge import copy
from replay.trace.reader import Trace, open_trace
from replay.trace.writer import TraceWriter
from replay.trim import trim
from replay.verdict import Finding, Verdict
from replay.words import counted

Progress = Callable[[str, int, int], None]

TRACE, REPRO = "trace.h5", "repro.py"
#: Every file of a bundle, in its order, and what it is.
FILES = {
    "REPLAY.md": "what this is, and how to replay it",
    "report.html": "the verdict from symptom to byte",
    "verdict.json": "the verdict, schema kv-replay/verdict/1",
    "environment.json": "versions, modes and geometry of the recorded processes",
    REPRO: "shows the difference, with numpy alone",
    "pages.npz": "the pages that repro.py shows: right, wrong, whose bytes they are, and those beside them",
    TRACE: "the trace, cut down and rewritten for strangers",
}
#: Seconds for each of the proof's two child processes.
PROOF_SECONDS = 600
_OPTIONS = JudgeOptions(reexecute=False)
_UNITS = ((1000**3, "GB"), (1000**2, "MB"), (1000, "kB"))
_DATE = (1980, 1, 1, 0, 0, 0)  # the earliest that a ZIP can hold: it says nothing


class BundleError(Exception):
    """No bundle can be made; the message says why and what to do."""


class TooLargeError(BundleError):
    """What was asked for does not fit into the size that was allowed."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """The files of a bundle, made but not written.

    Attributes:
        files: name -> content, in order.
        verdict: the verdict that it encloses.
        cases: differences that repro.py shows.
        left_out: what was left out, in words.
    """

    files: dict[str, bytes]
    verdict: Verdict
    cases: int
    left_out: tuple[str, ...]

    @property
    def size(self) -> int:
        """Bytes of the ZIP."""
        return len(zipped(self.files))


def make(
    paths: tuple[Path, ...], max_size: int, scope: Scope | None = None, progress: Progress | None = None
) -> Bundle:
    """The largest bundle of ``paths`` within ``max_size`` bytes.

    Args:
        paths: traces, journals, folders.
        max_size: most bytes of the ZIP.
        scope: what to bundle; by default all requests that a finding names, or everything where none does.
        progress: called with what is being done.

    Raises:
        TooLargeError: even the first finding alone is too large.
        BundleError: the copy gives another verdict.
    """
    smallest = 0
    with tempfile.TemporaryDirectory(prefix="kv-replay-") as folder:
        with open_trace(*paths) as trace:
            whole = judge(trace, replace(_OPTIONS, scope=scope or Scope()), progress)
        parts = list(_parts(whole, scope))
        for number, (part, said) in enumerate(parts):
            cut = Path(folder) / f"cut-{number}.h5"
            if part.whole:
                left_out, source = [], paths
            else:
                done = trim(paths, cut, part, progress=progress)
                source = (cut,)
                left_out = [said] if said else []
                requests, records = done.known - done.requests, done.of - done.records
                if requests or records:
                    left_out.append(
                        f"{requests:,} of {counted(done.known, 'request')}, and {records:,} of "
                        f"{counted(done.of, 'record')}, which are no evidence for what is enclosed"
                    )
            out = Path(folder) / f"trace-{number}.h5"
            names = _scrubbed(source, out, progress)
            # The last one is made all the same: what it takes is told.
            if out.stat().st_size > max_size and number < len(parts) - 1:
                continue
            bundle = _made(out, tuple(left_out), progress)
            _same(whole, part, bundle.verdict, names)
            smallest = bundle.size
            if smallest <= max_size:
                return bundle
    raise TooLargeError(
        f"the smallest part that shows the verdict takes {smallest:,} bytes, and {max_size:,} are allowed: give "
        f"--max-size {_enough(smallest)} or more, or name less with --request and --layer"
    )


def _enough(size: int) -> str:
    """A round size that ``size`` bytes fit into for certain: no two copies of a trace compress to the same byte."""
    size += size // 100
    step = max(1, 10 ** (len(str(size)) - 3))
    rounded = -(-size // step) * step
    unit, name = next((unit, name) for unit, name in _UNITS if rounded >= unit or unit == 1000)
    return f"{rounded / unit:g}{name}"


def _parts(whole: Verdict, scope: Scope | None) -> Iterator[tuple[Scope, str]]:
    """What to bundle, the most first, and what a smaller part leaves out in words."""
    findings = whole.findings
    base = scope or Scope()
    if not findings:
        yield base, ""
        return
    rooms = frozenset(finding.request.room for finding in findings)
    yield base.joined(Scope(rooms=rooms)), ""
    first = findings[0]
    one = base.joined(Scope(rooms=frozenset({first.request.room})))
    said = ""
    if len(rooms) > 1:
        said = f"the findings of {counted(len(rooms) - 1, 'other request')}"
        yield one, said
        said += ", and "
    one = one.joined(Scope(layers=frozenset({first.layer})))
    yield one, f"{said}the findings in other layers than {first.layer}"
    if first.pages:
        logical = frozenset(page.logical for page in first.pages[:4])
        yield (
            one.joined(Scope(logical=logical)),
            f"all findings but those of layer {first.layer}, logical pages {', '.join(map(str, sorted(logical)))}",
        )


def _scrubbed(paths: tuple[Path, ...], out: Path, progress: Progress | None) -> dict[str, str]:
    """Write the copy for strangers; returns what each cache is called in it."""
    with open_trace(*paths) as trace, TraceWriter(out) as writer:
        rewrite = Scrub(trace)
        copy(trace, writer, progress, rewrite=rewrite)
        return {str(name): rewrite.buffer_name(str(name)) for name in set(trace.table("buffer")["name"])}


def _same(whole: Verdict, part: Scope, found: Verdict, names: dict[str, str]) -> None:
    """The copy must say what the trace says, within its part."""
    expected, _ = part.limit(whole.findings)
    if _keys(expected, names) != _keys(found.findings, {}) or (
        not expected and whole.verdict != found.verdict
    ):
        raise BundleError(
            "the part cut out for the bundle gives another verdict than the trace; that is a fault of kv-replay: "
            "please report it, and send the output of 'replay trim' meanwhile"
        )


def _keys(findings: Any, names: dict[str, str]) -> list[str]:
    def key(finding: Finding) -> str:
        f = finding
        buffer = names.get(f.buffer, f.buffer)
        return repr((f.code, f.stage, f.confidence, f.request, f.role, f.rank, buffer, f.layer, f.pages))

    return sorted(map(key, findings))


def _made(path: Path, left_out: tuple[str, ...], progress: Progress | None) -> Bundle:
    """All files, from the copy alone."""
    with open_trace(path) as trace:
        verdict = judge(trace, _OPTIONS, progress)
        cases = cases_of(trace, verdict)
        story = tell(trace, verdict, TRACE)
        environment = _environment(trace)
        report = report_html(story)
    arrays = io.BytesIO()
    np.savez_compressed(arrays, **arrays_of(cases))  # type: ignore[arg-type]  # names cannot clash with its own
    repro = (resources.files("analysis") / "templates" / REPRO).read_text(encoding="utf-8")
    files = {
        "report.html": report.encode(),
        "verdict.json": _json(verdict.to_json()),
        "environment.json": _json(environment),
        REPRO: repro.encode(),
        "pages.npz": arrays.getvalue(),
        TRACE: path.read_bytes(),
    }
    words = replay_md(story, FILES, left_out, len(cases))
    return Bundle({"REPLAY.md": words.encode(), **files}, verdict, len(cases), left_out)


def _json(body: Any) -> bytes:
    return (json.dumps(body, indent=2, allow_nan=False, default=_plain) + "\n").encode()


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def _environment(trace: Trace) -> dict[str, Any]:
    """What the copy knows of each process."""
    table = trace.table("buffer")
    columns = ("name", "layer", "format", "pages", "pitch", "item_length", "tokens_per_row", "memory")
    return {
        "schema": "kv-replay/environment/1",
        "processes": [
            {
                **{
                    name: getattr(info, name)
                    for name in ("role", "rank", "host", "engine", "mode", "transport")
                },
                "options": info.options,
                "environment": info.environment,
                "buffers": [
                    {name: table[name][row] for name in columns}
                    for row in np.flatnonzero(table["process"] == number).tolist()
                ],
            }
            for number, info in enumerate(trace.processes)
        ],
    }


def zipped(files: dict[str, bytes]) -> bytes:
    """``files`` as a ZIP: the same files give the same bytes, and no entry has a date or an owner."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name, _DATE)
            entry.external_attr = 0o644 << 16
            # What is compressed already would only take time.
            packed = name in (TRACE, "pages.npz")
            entry.compress_type = zipfile.ZIP_STORED if packed else zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)
    return out.getvalue()


def prove(path: Path) -> list[str]:
    """Unpack the bundle into an empty folder and replay it there in a process of its own; what is wrong, in words."""
    with tempfile.TemporaryDirectory(prefix="kv-replay-") as folder:
        with zipfile.ZipFile(path) as archive:
            if archive.namelist() != list(FILES):
                return ["its files are not those that it should have"]
            archive.extractall(folder)
        enclosed = json.loads((Path(folder) / "verdict.json").read_text(encoding="utf-8"))
        code = "import sys; from replay.cli import main; main(sys.argv[1:])"
        try:
            replayed = _child(["-c", code, TRACE, "--json", "--no-reexecute"], folder)
            shown = _child([REPRO], folder)
        except subprocess.TimeoutExpired as error:
            return [f"its replay or its {REPRO} took more than {error.timeout:g} s"]
    problems = []
    try:
        again = json.loads(replayed.stdout)
    except ValueError:
        again = None
    if again != enclosed:
        last = replayed.stderr.strip().splitlines()[-1:] or ["another verdict"]
        problems.append(f"the replay of its trace does not give the enclosed verdict: {last[0]}")
    if shown.returncode:
        last = (shown.stderr or shown.stdout).strip().splitlines()[-1:] or [f"exit code {shown.returncode}"]
        problems.append(f"its {REPRO} does not show the difference: {last[0]}")
    return problems


def _child(args: list[str], folder: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PROOF_SECONDS,
        check=False,
        stdin=subprocess.DEVNULL,
    )


__all__ = ["FILES", "Bundle", "BundleError", "make", "prove", "zipped"]
