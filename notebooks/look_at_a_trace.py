# %% [markdown]
# # Look at a trace
#
# What `replay` says in words is here as arrays. Open this file as a notebook (Jupyter with jupytext, or an editor
# that knows `# %%` cells), or run it: `TRACE=demo/trace.h5 .venv/bin/python notebooks/look_at_a_trace.py`.

# %%
import os
from pathlib import Path

import numpy as np

from analysis.diff import busiest_request, stage_grid
from analysis.plots import stage_grid as draw
from analysis.report import verdict_text
from analysis.timeline_text import request_entries, timeline_text
from capture_hooks.layouts import layout
from figures import show
from replay.judge import judge
from replay.trace.reader import open_trace

trace = open_trace(os.environ.get("TRACE", "demo/trace.h5"))
for number, process in enumerate(trace.processes):
    print(number, process.role, process.rank, process.engine, process.mode, process.transport)

# %% [markdown]
# ## Tables are columns
#
# Every kind of record is a table; scalars are numpy columns, lists are ragged columns.

# %%
snapshots = trace.table("snapshot")
stages, counts = np.unique(snapshots["stage"], return_counts=True)
print(dict(zip(stages.tolist(), counts.tolist(), strict=True)))

# %% [markdown]
# ## The verdict, and the request that it names

# %%
verdict = judge(trace)
print(verdict_text(verdict))
room, attempt = busiest_request(trace, verdict) or (-1, 0)

# %%
print(timeline_text(trace, f"room {room}", request_entries(trace, room, attempt)[:20]))

# %%
grid = stage_grid(trace, verdict, room, attempt)
if grid is not None:
    out = Path(os.environ.get("OUT", "."), "stages.png")
    show(draw(grid, f"{verdict.verdict.upper()}\nroom {room}"), out)
    print(out)

# %% [markdown]
# ## Bytes
#
# Two looks at one page, byte by byte, where the bytes were kept: the first finding's first page as it should be, and
# the first look that shows what the finding tells. Looks from before the fault are right, so which look it is matters.


# %%
def contents_of(stage: str, logical: int, buffer_layer: tuple[str, int]) -> list[int]:
    """Ids of the contents of the request's logical page at one stage."""
    buffers = trace.table("buffer")
    names = {
        (p, b): (n, k)
        for p, b, n, k in zip(*(buffers[c] for c in ("process", "buffer", "name", "layer")), strict=True)
    }
    chosen = (snapshots["stage"] == stage) & (snapshots["room"] == room) & (snapshots["attempt"] == attempt)
    if stage == "RC":
        chosen &= snapshots["moment"] != "before"  # the page's old content
    ids = []
    for row in np.flatnonzero(chosen):
        if names.get((snapshots["process"][row], snapshots["buffer"][row])) == buffer_layer:
            places = np.flatnonzero(snapshots.ragged("logical")[row] == logical)
            ids += snapshots.ragged("content")[row][places].tolist()
    return [number for number in ids if number >= 0 and trace.contents.has_data[number]]


if verdict.findings and verdict.findings[0].pages:
    finding = verdict.findings[0]
    page, place = finding.pages[0], (finding.buffer, finding.layer)
    before = contents_of("ST", page.logical, place) or contents_of("SE", page.logical, place)
    after = [
        (stage, content)
        for stage in ("SE", "RC", "LT", "RD")
        for content in contents_of(stage, page.logical, place)
    ]
    for stage, content in after if before else ():
        right, seen = trace.contents.data(np.array([before[0], content]))
        told = np.zeros(len(right), bool)
        for begin, end in page.byte_ranges:
            told[begin:end] = True
        wrong = np.flatnonzero((right != seen) & told)
        if len(wrong) != page.bytes_differing:
            continue  # a look from before the fault
        form = next(f for f in ("fp8", "bf16", "fp4") if layout(f).page_bytes == len(right))
        print(
            f"logical page {page.logical} of layer {finding.layer}, {form}: "
            f"{len(wrong)} of {len(right)} bytes of {stage} differ"
        )
        rows = np.unique(wrong[wrong < layout(form).scale_base] // layout(form).value_bytes)
        print("rows whose values differ:", rows.tolist())
        break

# %%
trace.close()
