# %% [markdown]
# # A tour on a small trace
#
# `tour.h5` beside this file holds three requests of a prefill/decode pair; one of them went wrong. Nothing here needs a
# GPU.
#
# `tour.ipynb` is this with the output of a run, for reading and for Jupyter; `tour.py` runs with `.venv/bin/python`.
# What it writes goes into the current folder, or into `OUT`.

# %%
import os
from pathlib import Path

from analysis import diff
from analysis.pictures import picture
from analysis.report import verdict_text
from analysis.timeline_text import request_entries, timeline_text
from figures import show
from replay.judge import JudgeOptions, judge
from replay.trace.reader import open_trace

OUT = Path(os.environ.get("OUT", "."))
trace = open_trace(Path(__file__).with_name("tour.h5") if "__file__" in globals() else "tour.h5")

# %% [markdown]
# ## The verdict
#
# The same as `replay notebooks/tour.h5`. It names the first stage at which a page is wrong, and why.

# %%
verdict = judge(trace, JudgeOptions(reexecute=False))
print(verdict_text(verdict))

# %% [markdown]
# ## Which pages, at which stage?
#
# Room 12 was stored and sent right. At its arrival its second page differs, and so it does where it is read; a little
# later it is right again. The bytes came after their arrival had been told.

# %%
drawn = picture("grid", trace, verdict)
show(drawn.figure, OUT / "tour-grid.png")
print(drawn.said)

# %% [markdown]
# ## Which bytes?
#
# The first half of the page is there, the second is not: a cut at byte 4,096, which is no border of anything but a
# transfer. Rows 32 to 63 lack their values, and all 64 rows their scales, which lie behind all values.

# %%
finding = verdict.findings[0]
page = diff.page_bytes(
    trace, finding.request.room, 0, finding.buffer, finding.layer, finding.pages[0].logical
)
assert page is not None
print(f"{page.differing:,} bytes differ between {page.stages[0]} and {page.stages[1]}")
show(picture("bytes", trace, verdict).figure, OUT / "tour-bytes.png")

# %% [markdown]
# ## In which order?
#
# "status heard" stands before "transfer ... done": decode was told before the sender itself knew. The order comes from
# the sequence within each process and from the protocol's own edges, never from clocks.

# %%
print(timeline_text(trace, "room 12", request_entries(trace, 12)))
show(picture("ownership", trace, verdict).figure, OUT / "tour-ownership.png")

# %% [markdown]
# ## Pass it on
#
# `replay report notebooks/tour.h5 -o report.html` tells all of this in one file; `replay bundle notebooks/tour.h5 -o
# bug.zip` packs it for a bug report, with a script that shows the difference with numpy alone.

# %%
trace.close()
