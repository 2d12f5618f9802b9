# %% [markdown]
# # Record an engine of your own
#
# An engine that kv-replay has never seen, a prefill and a decode side in sixty lines of numpy, is recorded with the tap
# functions until a verdict is clean, and until another names a fault. It takes a few seconds.
#
# `record_an_engine.ipynb` is this with the output of a run, for reading and for Jupyter; `record_an_engine.py` runs
# with `.venv/bin/python`. What it writes goes into the current folder, or into `OUT`.

# %%
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from analysis.pictures import picture
from analysis.report import verdict_text
from capture_hooks.events import (
    Alloc,
    Buffer,
    Free,
    Process,
    Read,
    Receive,
    Request,
    Send,
    Store,
    TransferState,
)
from capture_hooks.options import Options
from capture_hooks.recorder import Recorder
from capture_hooks.taps.methods import Hooks
from capture_hooks.taps.pages import look
from figures import show
from replay.judge import JudgeOptions, judge
from replay.trace.merge import merge
from replay.trace.reader import open_trace

OUT = Path(os.environ.get("OUT", "."))

# %% [markdown]
# ## The engine
#
# Pages of 64 rows of 128 bf16 values. Decode announces where the pages are to go, prefill stores the rows and writes
# them into decode's pool in two parts, says "done", and decode reads. With `hasty` it says so after the first part:
# that is the fault for later. Nothing here knows of a recorder.

# %%
ROWS, PAGE = 64, 64 * 128 * 2


@dataclass(eq=False)
class Job:
    """A request: its room, its length in rows, its pages on both sides."""

    room: int
    rows: int
    source: list[int] = field(default_factory=list)
    target: list[int] = field(default_factory=list)


class Prefill:
    def __init__(self) -> None:
        self.pool, self.free = np.zeros((24, PAGE), np.uint8), list(range(24))

    def start(self, job: Job) -> None:
        job.source = [self.free.pop() for _ in range(-(-job.rows // ROWS))]

    def store(self, job: Job, slots: np.ndarray) -> None:
        keys = np.random.default_rng(job.room).standard_normal((job.rows, 128), np.float32)
        self.pool.reshape(-1, 256)[slots] = (keys.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)

    def post(self, job: Job, pool: np.ndarray) -> None:
        self.move(job, pool, slice(0, PAGE // 2))

    def move(self, job: Job, pool: np.ndarray, part: slice) -> None:
        pool[job.target, part] = self.pool[job.source, part]

    def done(self, job: Job, pool: np.ndarray) -> None:
        self.move(job, pool, slice(PAGE // 2, PAGE))

    def tell(self, job: Job) -> None:
        pass  # a message to decode

    def finish(self, job: Job) -> None:
        self.free += job.source


class Decode:
    def __init__(self) -> None:
        self.pool, self.free = np.zeros((16, PAGE), np.uint8), list(range(16))

    def start(self, job: Job) -> None:
        job.target = [self.free.pop() for _ in range(-(-job.rows // ROWS))]

    def announce(self, job: Job) -> None:
        pass  # a message to prefill

    def arrived(self, job: Job) -> None:
        pass  # prefill's message

    def read(self, job: Job, query: np.ndarray, weights: np.ndarray) -> np.ndarray:
        codes = self.pool[job.target].reshape(-1, 256)[: job.rows].view(np.uint16)
        keys = (codes.astype(np.uint32) << 16).view(np.float32)
        return weights @ np.maximum(query @ keys.T, 0)

    def finish(self, job: Job) -> None:
        self.free += job.target


def serve(job: Job, prefill: Prefill, decode: Decode, hasty: bool) -> None:
    """One request from start to end."""
    decode.start(job)
    decode.announce(job)
    prefill.start(job)
    prefill.store(job, np.concatenate([page * ROWS + np.arange(ROWS) for page in job.source])[: job.rows])
    prefill.post(job, decode.pool)
    if not hasty:
        prefill.done(job, decode.pool)
    prefill.tell(job)
    decode.arrived(job)
    draw = np.random.default_rng(job.room + 1)
    decode.read(job, draw.standard_normal((4, 128), np.float32), draw.random(4, np.float32))
    if hasty:
        prefill.done(job, decode.pool)
    decode.finish(job)
    prefill.finish(job)


# %% [markdown]
# ## The hooks
#
# A hook says what a call means: it emits records (`capture_hooks/events.py`), takes looks at pages, and tells the two
# ends of the edges that the protocol makes. `covers` is a promise: this hook sees all of it. Without a hook that
# covers, say, `alloc`, the absence of a record proves nothing, and no verdict is clean.
#
# In a server there is one recorder a process, from `capture_hooks.start(Process(...))`, which does nothing unless
# `KV_REPLAY_CAPTURE` is set. Here both sides live in one process, so each gets a recorder of its own. The judge takes
# them for two processes all the same: only the edges order them.


# %%
def record_prefill(recorder: Recorder, engine: Prefill, target: np.ndarray) -> Hooks:
    """Hooks of the sending side; ``target`` is decode's pool."""
    recorder.inventory.add(Buffer(buffer=0, layer=0, format="bf16", item_length=PAGE), engine.pool)

    def pages(stage: str, moment: str, job: Job, transfer: int = -1) -> None:
        look(recorder, stage, moment, [0], job.source, range(len(job.source)), room=job.room, rows=job.rows,
             transfer=transfer)  # fmt: skip

    def places(pool: np.ndarray, ids: list[int]) -> list[tuple[int, int]]:
        return [(pool.ctypes.data + page * PAGE, PAGE) for page in ids]

    def started(_: None, engine: Prefill, job: Job) -> None:
        recorder.emit(Request(job.room, rows=job.rows))
        recorder.emit(Alloc(job.room, pages=np.array(job.source)))
        recorder.head("announce", f"{job.room}")

    def stored(_: None, engine: Prefill, job: Job, slots: np.ndarray) -> None:
        rows = np.arange(job.rows)
        recorder.emit(Store(job.room, buffer=0, slots=slots, positions=rows, logical_rows=rows))
        pages("ST", "", job)

    def post(engine: Prefill, job: Job, pool: np.ndarray) -> None:
        pages("SE", "before", job, transfer=job.room)
        recorder.emit(
            Send(
                transfer=job.room, room=job.room, last=True, written=1, logical=0, pages=np.array(job.source),
                destination_pages=np.array(job.target), item_lengths=np.array([PAGE]),
                source=np.array(places(engine.pool, job.source), np.uint64),
                destination=np.array(places(target, job.target), np.uint64),
            )
        )  # fmt: skip

    def done(_: None, engine: Prefill, job: Job, pool: np.ndarray) -> None:
        recorder.emit(TransferState("done", transfer=job.room, room=job.room))
        pages("SE", "after", job, transfer=job.room)

    def finish(engine: Prefill, job: Job) -> None:
        recorder.emit(Request(job.room, phase="finish"))
        recorder.emit(Free(job.room, pages=np.array(job.source), reason="finish"))

    hooks = Hooks(recorder, "mine")
    hooks.wrap(Prefill, "start", "alloc", after=started)
    hooks.wrap(Prefill, "store", "store", after=stored)
    hooks.wrap(Prefill, "post", "send", before=post)
    hooks.wrap(Prefill, "done", "completion", after=done)
    hooks.wrap(Prefill, "tell", "order", before=lambda _, job: recorder.tail("status", f"{job.room}"))
    hooks.wrap(Prefill, "finish", "alloc", before=finish)
    return hooks


def record_decode(recorder: Recorder, engine: Decode) -> Hooks:
    """Hooks of the reading side."""
    recorder.inventory.add(Buffer(buffer=0, layer=0, format="bf16", item_length=PAGE), engine.pool)

    def pages(stage: str, moment: str, job: Job, step: int = -1) -> None:
        look(recorder, stage, moment, [0], job.target, range(len(job.target)), room=job.room, rows=job.rows,
             step=step)  # fmt: skip

    def started(_: None, engine: Decode, job: Job) -> None:
        recorder.emit(Request(job.room, rows=job.rows))
        recorder.emit(Alloc(job.room, pages=np.array(job.target)))

    def announce(engine: Decode, job: Job) -> None:
        pages("RC", "before", job)
        lengths = np.array([PAGE])
        recorder.emit(
            Receive(job.room, pages=np.array(job.target), buffers=np.array([0]), item_lengths=lengths)
        )
        recorder.tail("announce", f"{job.room}")

    def arrived(engine: Decode, job: Job) -> None:
        recorder.head("status", f"{job.room}")
        recorder.emit(TransferState("arrived", room=job.room))
        pages("RC", "", job)
        recorder.emit(Request(job.room, phase="arrived", rows=job.rows))

    def reading(read, engine: Decode, job: Job, query: np.ndarray, weights: np.ndarray) -> np.ndarray:
        table = np.array(job.target)  # what the kernel is given, copied before it runs
        pages("RD", "before", job, step=job.room)
        mark = recorder.mark()
        logits = read(engine, job, query, weights)
        with recorder.guard("mine.Decode.read"):
            recorder.emit(
                Read(
                    job.room, buffer=0, step=job.room, rows=job.rows, table=table, table_after=np.array(job.target),
                    query=query.reshape(-1), weights=weights, logits=logits,
                ),
                mark,
            )  # fmt: skip
            pages("RD", "after", job, step=job.room)
        return logits

    def finish(engine: Decode, job: Job) -> None:
        pages("LT", "end", job)
        recorder.emit(Request(job.room, phase="finish"))
        recorder.emit(Free(job.room, pages=np.array(job.target), reason="finish"))

    hooks = Hooks(recorder, "mine")
    hooks.wrap(Decode, "start", "alloc", after=started)
    hooks.wrap(Decode, "announce", "receive", before=announce)
    hooks.wrap(Decode, "arrived", "completion", before=arrived)
    hooks.wrap(Decode, "read", "read", around=reading)
    hooks.wrap(Decode, "finish", "alloc", before=finish)
    return hooks


# %% [markdown]
# ## Record, seal, replay
#
# Mode `full` keeps the bytes of every page. Hooks put the very same functions back when they are over.


# %%
def recorded(name: str, hasty: int) -> Path:
    """Serve six requests with the capture on; request number ``hasty`` is told complete too early."""
    folder = OUT / name
    shutil.rmtree(folder, ignore_errors=True)
    prefill, decode = Prefill(), Decode()
    options = Options(capture=folder, mode="full", seal=False)
    recorders = [Recorder(options, Process(role, engine="mine")) for role in ("prefill", "decode")]
    hooks = [record_prefill(recorders[0], prefill, decode.pool), record_decode(recorders[1], decode)]
    for number in range(6):
        serve(Job(100 + number, 220 - 30 * number), prefill, decode, hasty=number == hasty)
    for one in hooks:
        one.restore()
    for recorder in recorders:
        recorder.close()
    merge([folder], OUT / f"{name}.h5", replace=True)  # `replay seal` and `replay merge` in one
    return OUT / f"{name}.h5"


original = Prefill.store
with open_trace(recorded("engine-right", hasty=-1)) as trace:
    right = judge(trace, JudgeOptions(reexecute=False))
print(verdict_text(right))
assert Prefill.store is original
assert right.verdict == "clean"
assert {"source", "descriptor", "wire", "completion", "destination", "table", "read-kernel"} <= set(
    right.cleared
)

# %% [markdown]
# Clean within its scope: the store's inputs were not recorded (`Store.keys`), so it could not be done again.
#
# Now the fourth request is told complete when half of each page has been written.

# %%
trace = open_trace(recorded("engine-hasty", hasty=3))
verdict = judge(trace, JudgeOptions(reexecute=False))
print(verdict_text(verdict))
assert verdict.verdict == "divergent"
(finding,) = verdict.findings
assert (finding.code, finding.request.room, finding.confidence) == ("F09", 103, "certain")
assert [page.value_rows for page in finding.pages] == [((32, 63),), ((32, 63),)]

# %% [markdown]
# The grid shows when it was wrong, the bytes show what: rows 32 to 63 of its two full pages (the third has two rows).
# What lies there are the keys of a request that had the page before. They look like any other keys, and by the end all
# is right again.

# %%
for kind in ("grid", "bytes"):
    drawn = picture(kind, trace, verdict)
    show(drawn.figure, OUT / f"engine-{kind}.png")
    print(drawn.said)

# %% [markdown]
# For a device, give `inventory.add` the tensor: `look` then copies in stream order without waiting. Pages that NIXL
# moves need no hook of yours: `capture_hooks.adapters.nixl.install(recorder)` sees every post. The lab's adapter
# (`replay/lab/capture*.py`) is a whole one, with threads, chunks and aborts; `replay trace.h5 --verbose` says what a
# verdict still lacks.

# %%
trace.close()
