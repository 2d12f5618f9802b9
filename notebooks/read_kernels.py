# %% [markdown]
# # The read kernel against the reference, and your own kernel
#
# Is it the kernel: the read against a float64 reference on made-up caches, as an offline test does it, then a kernel of
# your own on caches that were captured from a running pair. Triton runs on its interpreter where there is no GPU; all
# of it takes some twenty seconds.
#
# `read_kernels.ipynb` is this with the output of a run, for reading and for Jupyter; `read_kernels.py` runs with
# `.venv/bin/python`. What it writes goes into the current folder, or into `OUT`.

# %%
import contextlib
import os
import sys
from pathlib import Path

import numpy as np
import torch

from analysis.plots import style
from analysis.report import verdict_text
from capture_hooks.layouts import layout
from figures import show
from replay.judge import JudgeOptions, judge
from replay.kernels import launch
from replay.kernels.reference import logits_reference
from replay.lab.config import LabConfig
from replay.lab.run import Pair
from replay.recorded import Skipped, read_case, read_snapshots
from replay.timeline import Timeline
from replay.trace.reader import open_trace

device = launch.prepare()  # before anything imports triton: without a GPU it turns the interpreter on
from replay.kernels.check import Plan, check_reads, judge_read, make_case
from replay.kernels.read import read

OUT = Path(os.environ.get("OUT", "."))
HERE = Path(__file__).parent if "__file__" in globals() else Path.cwd()

# %% [markdown]
# ## On made-up caches
#
# Eight requests of varied lengths, their pages scattered over a pool, 64 heads. The reference is float64 numpy, written
# from the page layout; every row has its own bound: how far a right fp32 kernel may be off. `error` is the largest
# distance over that bound (up to 1 is right); the Jaccard index compares the two top-512. (`replay kernels` does the
# same for every format and batch.)

# %%
plan = Plan(formats=("bf16", "fp8", "fp4"), batches=(8,), device=device, rows={8: 640})
print(f"format  lengths   rows   error   rows wrong  top-512   ({device})")
for result in check_reads(plan):
    print(
        f"{result.format:<6}  {result.lengths:<7}  {result.rows:>5,}  {result.error:.4f}  {result.wrong_rows:>10}"
        f"  {result.jaccard:.4f}"
    )
    assert result.status == "right"
    assert result.jaccard > 0.99

# %% [markdown]
# Is a bound for each row of any use? Take a read whose query is rounded to bf16. By its top-512 it passes; by the bound
# most of its rows are wrong.

# %%
case = make_case(layout("bf16"), np.random.default_rng(1), batch=8, longest=640, varied=True)
cache, table, rows, query, weights = (
    torch.from_numpy(array).to(device)
    for array in (case.cache, case.table, case.rows, case.query, case.weights)
)


def errors_over_bound(logits: torch.Tensor) -> np.ndarray:
    """Distance of each logit from the reference over its bound, all requests one after another."""
    found = []
    for request, length in enumerate(case.rows.tolist()):
        pages = case.cache[case.table[request, : -(-length // 64)]]
        right, bound = logits_reference(
            case.layout, pages, length, case.query[request], case.weights[request]
        )
        distance = np.abs(logits[request, :length].cpu().numpy().astype(np.float64) - right)
        found.append((distance / bound)[np.isfinite(bound)])
    return np.concatenate(found)


errors = {}
for name, given in (("Triton read", query), ("query rounded to bf16", query.bfloat16().float())):
    logits, top_k = read(case.layout, cache, table, rows, given, weights, 512)
    errors[name] = errors_over_bound(logits)
    jaccard = judge_read(case, logits.cpu().numpy(), top_k.cpu().numpy(), kernel=name, seconds=0.0).jaccard
    print(f"{name:<22} {(errors[name] > 1).mean():6.1%} of the rows outside the bound, top-512 {jaccard:.4f}")
    assert jaccard > 0.97
plain, rounded = errors.values()
assert plain.max() < 0.1
assert (rounded > 1).mean() > 0.5

figure = style.empty(7.0, 3.4)
ax = style.axes_at(figure, 0.7, 0.95, 6.0, 1.75)
bins = np.logspace(-6, 3, 73)
for (name, values), color in zip(errors.items(), (style.BLUE, style.BAD), strict=True):
    ax.hist(np.maximum(values, bins[0]), bins, color=color, alpha=0.75, label=name)
ax.axvline(1, color=style.INK, linewidth=1, linestyle="--")
ax.annotate(
    "bound", (1, 1), (-4, -4), ("data", "axes fraction"), "offset points", ha="right", va="top", fontsize=8
)
ax.set_xscale("log")
ax.set_xlabel(
    "distance from the reference, as a fraction of the row's bound (exact ones at the left edge)", fontsize=8
)
ax.set_ylabel("rows", fontsize=8)
style.title(figure, f"How far the logits are from the float64 reference\n{len(plain):,} rows of bf16 pages")
style.legend(figure, ax.get_legend_handles_labels()[0])
show(figure, OUT / "read-errors.png")

# %% [markdown]
# ## On captured caches
#
# A small round of the lab, without any fault. Each request's first read is recorded with its block table, query,
# weights, logits and the pages before and after the kernel.

# %%
config = LabConfig(
    format="bf16",
    layers=2,
    requests=4,
    concurrency=4,
    tokens=(600, 1000),
    long_share=0.0,
    new_tokens=(4, 8),
    impatient=0.0,
    triton_pages=0,
)
capture = OUT / "capture-kernels"
with Pair() as pair:
    pair.run(config, capture, {"KV_REPLAY_SEAL": "0"})

# %% [markdown]
# Your kernel is a function in a module of yours. This one is a Triton kernel for bf16 pages; it is there twice, and the
# second has 8,448 written into it, the bytes of a page in fp8.

# %%
print((HERE / "my_kernels.py").read_text())

# %% [markdown]
# `replay TRACE --read-kernel my_kernels:read` runs it on the captured pages, in a child process, and judges what it
# computes by the reference. From Python:

# %%
trace = open_trace(capture)


def verdict_with(kernel: str):
    """The verdict on the capture with the user's kernel in the place of the one that ran."""
    with contextlib.chdir(HERE):  # modules are looked for in the current folder and on PYTHONPATH
        return judge(trace, JudgeOptions(sample=4, read_kernel=kernel))


right = verdict_with("my_kernels:read")
print(verdict_text(right))
assert right.verdict == "clean"
assert "read-kernel" in right.cleared

# %% [markdown]
# And with the leftover. The verdict names the stage, the kind, and the number; store, transfer, pages and table are
# cleared.

# %%
wrong = verdict_with("my_kernels:read_with_a_leftover")
print(verdict_text(wrong))
assert {(f.code, f.stage) for f in wrong.findings} == {("F20", "read-kernel")}
assert "page p is read at byte p * 8,448, the stride of the buffer is 16,384" in wrong.findings[0].rule

# %% [markdown]
# One captured read, row by row. Its pages lie side by side here, from page 0 on, and page 0 is right whatever the
# stride: an offline test whose requests fit into one page passes.

# %%
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))
import my_kernels

timeline, reads = Timeline(trace), trace.table("read")
row = int(np.argmax(np.where(reads.bulk_size("logits") > 0, reads["rows"], 0)))
request = timeline.request_number(int(reads["room"][row]), 0)
seen = read_case(timeline, row, int(reads["process"][row]), request, read_snapshots(timeline), Skipped({}))
reference, bound = logits_reference(seen.layout, seen.pages, seen.rows, seen.query, seen.weights)
arguments = (
    torch.from_numpy(np.ascontiguousarray(seen.pages)).to(device),
    torch.arange(len(seen.pages), device=device)[None],
    torch.tensor([seen.rows], device=device),
    torch.from_numpy(seen.query.copy()).to(device)[None],
    torch.from_numpy(seen.weights.copy()).to(device)[None],
)

figure = style.empty(7.0, 3.6)
ax = style.axes_at(figure, 0.7, 0.95, 5.6, 1.95)
for kernel, color, shape in (
    (my_kernels.read, style.BLUE, "o"),
    (my_kernels.read_with_a_leftover, style.BAD, "^"),
):
    logits = kernel(seen.layout, *arguments, 512)[0][0].cpu().numpy()
    distance = np.abs(logits - reference) / bound
    ax.scatter(
        np.arange(seen.rows),
        np.maximum(distance, 1e-5),
        9,
        color,
        marker=shape,
        label=kernel.__name__,
        linewidths=0,
    )
ax.axhline(1, color=style.INK, linewidth=1, linestyle="--")
ax.annotate("bound", (1, 1), (4, 0), ("axes fraction", "data"), "offset points", va="center", fontsize=8)
for border in range(64, seen.rows, 64):
    ax.axvline(border, color=style.LINE, linewidth=0.8)
ax.set_yscale("log")
ax.set_xlabel("row; the lines are page borders", fontsize=8)
ax.set_ylabel("distance over bound", fontsize=8)
style.title(
    figure,
    f"Your kernel on a captured read\nroom {int(reads['room'][row])}, {seen.rows} rows in {len(seen.pages)} pages",
)
style.legend(figure, ax.get_legend_handles_labels()[0])
show(figure, OUT / "read-own-kernel.png")
assert (distance[:64] <= 1).all()
assert (distance[64:] > 1).mean() > 0.9

# %%
trace.close()
