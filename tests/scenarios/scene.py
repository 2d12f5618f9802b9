"""A prefill/decode pair told step by step into a trace.

A :class:`Scene` keeps the memory of both sides as plain arrays. Each step (store, post, land, arrive, read, ...)
does to that memory what an honest engine would do and writes down what honest hooks would have seen. A fault is
told by taking a step early, late, or by landing only a part of a transfer; ``poke`` changes bytes directly. So the
events of a scene always agree with its memory, and only the story decides what a judge can find.

``drop`` leaves kinds of record out, as a recorder that does not see them would: the names are those of the
builder's methods, and for snapshots their stage and moment ("SE.after", "RC"). Hooks of what is dropped are
declared missing, since otherwise their silence would be false evidence. ``slab`` is decode's stride from page to page
where it is larger than a page. ``skew_ns`` puts decode on another host whose clock differs by that much. A scene
``beside`` another one is the next rank's pair in the same trace.
``taps`` are the taps that the processes were asked to run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from capture_hooks.layouts import layout
from replay.trace.builder import TraceBuilder
from tests.scenarios import pattern
from tests.scenarios.side import I64, Job, Keep, Side, Transfer, kernel


class Scene:
    """A pair of processes on one host and the trace that is being written of them."""

    def __init__(
        self,
        folder: Path,
        *,
        layers: Sequence[int] = (0,),
        decode_layers: Sequence[int] | None = None,
        format: str = "fp8",
        decode_format: str | None = None,
        scales: pattern.Scales = "standard",
        keep: Keep = "bytes",
        pages: int = 48,
        drop: Iterable[str] = (),
        threads: bool = False,
        split: bool = False,
        hooks: bool = True,
        item_length: int = 0,
        slab: int = 0,
        grouped: bool = False,
        skew_ns: int = 0,
        beside: Scene | None = None,
        taps: Sequence[str] | None = None,
        run: str = "",
    ) -> None:
        self.rank = beside.rank + 1 if beside else 0
        self.scales = scales
        self.threads = threads
        self.grouped = grouped
        self.paths = [folder / "prefill.h5", folder / "decode.h5"] if split else [folder / "pair.h5"]
        self.builders = beside.builders if beside else [TraceBuilder(path) for path in self.paths]
        clock = beside.prefill.clock if beside else [0]
        common: dict[str, Any] = {
            "pages": pages,
            "keep": keep,
            "drop": frozenset(drop),
            "clock": clock,
        }
        told: dict[str, Any] = {
            "engine": "scene",
            "mode": "pages" if keep == "bytes" else "digest",
            "transport": "hand",
            "rank": self.rank,
            "options": "" if taps is None else json.dumps({"taps": list(taps)}),
        }
        away = self.rank << 40
        self.prefill = Side(
            role="prefill",
            agent=f"prefill-agent-{self.rank}",
            process=self.builders[0].process(role="prefill", run=f"p{run}{self.rank}", host="5a0c", **told),
            format=format,
            layers=tuple(layers),
            base=0x7F10_0000_0000 + away,
            first_buffer=0,
            item_length=item_length,
            **common,
        )
        self.decode = Side(
            role="decode",
            agent=f"decode-agent-{self.rank}",
            process=self.builders[-1].process(
                role="decode", run=f"d{run}{self.rank}", host="77fe" if skew_ns else "5a0c", **told
            ),
            skew_ns=skew_ns,
            format=decode_format or format,
            layers=tuple(layers if decode_layers is None else decode_layers),
            base=0x7E20_0000_0000 + away,
            first_buffer=20,
            item_length=0,
            slab=slab,
            **common,
        )
        self.sides = (self.prefill, self.decode)
        for side in self.sides:
            side.introduce(hooks)
        self._transfers = 0
        self._hands = 0
        self._steps = 0

    def close(self) -> None:
        for builder in self.builders:
            builder.close()

    def at(self, milliseconds: int) -> None:
        """Set the clock, which every record moves on by a microsecond."""
        self.prefill.clock[0] = milliseconds * 1_000_000

    # Order edges

    def edge(self, before: Side, after: Side, what: str, key: str) -> None:
        """An order edge of the protocol between the two processes."""
        wire = 1 if self.threads else 0
        if before is self.decode:
            self.hand(before, 0, wire)
        before.emit("order", what=what, key=key, end="tail", thread=wire)
        after.emit("order", what=what, key=key, end="head", thread=wire)
        self.hand(after, wire, 0)

    def hand(self, side: Side, giver: int, taker: int) -> None:
        """A hand-over between threads of one process; nothing where both are the same."""
        if giver == taker:
            return
        self._hands += 1
        key = f"{side.role}.{self._hands}"
        side.emit("order", what="queue", key=key, end="tail", thread=giver)
        side.emit("order", what="queue", key=key, end="head", thread=taker)

    # Steps of a request

    def step(self) -> int:
        self._steps += 1
        return self._steps

    def start(self, job: Job, *, prefill: bool = True, decode: bool = True) -> None:
        """Both sides learn of the request and give it pages."""
        for side, pages, wanted in (
            (self.prefill, job.prefill, prefill),
            (self.decode, job.decode, decode),
        ):
            if wanted:
                self.begin(side, job)
                self.give(side, job, pages)

    def begin(self, side: Side, job: Job, **fields: Any) -> None:
        told = {"tokens": job.rows, "rows": job.rows} | fields
        side.emit("request", room=job.room, attempt=job.attempt, phase="start", **told)

    def give(
        self, side: Side, job: Job, pages: Sequence[int], *, logical: int = 0, shared: bool = False
    ) -> None:
        side.emit(
            "alloc",
            room=job.room,
            attempt=job.attempt,
            logical=logical,
            pages=list(pages),
            shared=shared,
        )

    def announce(self, job: Job, *, first: int = 0, pages: Sequence[int] | None = None) -> None:
        """Decode tells its destination pages; the snapshot before it holds the old content."""
        side = self.decode
        told = [job.decode[k] for k in job.logical()[first:]] if pages is None else list(pages)
        logical = list(range(first, first + len(told)))
        side.snapshot("RC", "before", job, logical, told, rows=job.rows)
        side.emit(
            "receive",
            room=job.room,
            attempt=job.attempt,
            logical=first,
            pages=told,
            buffers=[side.buffer(layer) for layer in side.layers],
            item_lengths=[layout(side.format).page_bytes for _ in side.layers],
        )
        self.edge(self.decode, self.prefill, "announce", job.key)

    def write(self, side: Side, job: Job, first: int, last: int) -> I64:
        """The bytes of rows ``first .. last - 1`` reach memory, unseen; returns their slots."""
        tokens = np.arange(first, last)
        pages = np.asarray(job.prefill if side is self.prefill else job.decode)
        slots = pages[tokens // pattern.ROWS] * pattern.ROWS + tokens % pattern.ROWS
        how: dict[str, Any] = {"scales": self.scales, "format": side.format}
        for layer in side.layers:
            values, words = pattern.rows(job.q, layer, tokens, **how)
            if first < job.prefix_rows:
                shared = tokens < job.prefix_rows
                values[shared], words[shared] = pattern.rows(job.prefix_q, layer, tokens[shared], **how)
            side.write_rows(layer, slots, values, words)
        return np.asarray(slots, np.int64)

    def store(
        self,
        job: Job,
        first: int,
        last: int,
        *,
        side: Side | None = None,
        step: int | None = None,
        **fields: Any,
    ) -> None:
        """Rows ``first .. last - 1`` are written by a store, and seen complete once it is over."""
        side = side or self.prefill
        step = self.step() if step is None else step
        slots = self.write(side, job, first, last)
        self.tell_store(side, job, first, slots, step, **fields)
        self.seen_stored(side, job, first, last, step)

    def tell_store(self, side: Side, job: Job, first: int, slots: I64, step: int, **fields: Any) -> None:
        logical_rows = np.arange(first, first + len(slots))
        for layer in side.layers:
            side.emit(
                "store",
                room=job.room,
                attempt=job.attempt,
                buffer=side.buffer(layer),
                step=step,
                slots=slots,
                **{"positions": logical_rows, "logical_rows": logical_rows} | fields,
            )

    def seen_stored(self, side: Side, job: Job, first: int, last: int, step: int) -> None:
        logical = list(range(first // pattern.ROWS, (last - 1) // pattern.ROWS + 1))
        owned = job.prefill if side is self.prefill else job.decode
        side.snapshot("ST", "", job, logical, [owned[k] for k in logical], rows=last, step=step)

    def post(
        self,
        job: Job,
        logical: Sequence[int] | None = None,
        *,
        chunk: int = 0,
        last: bool = True,
        written: int = 1,
        awaited: int = 1,
        lengths: tuple[int, int] | None = None,
        strides: tuple[int, int] | None = None,
        destination: Sequence[int] | None = None,
        rows: int | None = None,
        pairs: Sequence[tuple[int, int]] | None = None,
        parts: Sequence[tuple[int, int, int]] = (),
        named: Sequence[int] | None = None,
    ) -> Transfer:
        """Prefill posts a transfer of the logical pages. Nothing has landed yet.

        ``lengths`` are the item lengths of the descriptors (source, destination), ``strides`` the bytes from page
        to page with which their addresses are computed; an honest sender uses the two page sizes. ``pairs`` are the
        source and destination layers; an honest sender pairs those that both sides have. ``parts`` are (start, stop,
        start in the source page) of the pieces in which every page is sent, where it is not sent whole.
        ``named`` are the source pages that the sender had for it, those that are carried where left out.
        """
        p, d = self.prefill, self.decode
        wire = 1 if self.threads else 0
        logical = list(job.logical() if logical is None else logical)
        source_pages = [job.prefill[k] for k in logical]
        target_pages = [job.decode[k] for k in logical] if destination is None else list(destination)
        length = lengths or (layout(p.format).page_bytes,) * 2
        stride = strides or (p.pitch, d.pitch)
        source, target = [], []
        for here, there in pairs or [(layer, layer) for layer in p.layers if layer in d.layers]:
            a = [p.address(here) + page * stride[0] for page in source_pages]
            b = [d.address(there) + page * stride[1] for page in target_pages]
            x, y = _rows(a, b, length, grouped=self.grouped)
            if parts:
                x = [(base + at, stop - start) for base in a for start, stop, at in parts]
                y = [(base + start, stop - start) for base in b for start, stop, _ in parts]
            source += x
            target += y
        self._transfers += 1
        self.hand(p, 0, wire)
        exist = rows if rows is not None else job.rows
        of = {"rows": exist, "transfer": self._transfers, "thread": wire}
        p.snapshot("SE", "before", job, logical, source_pages, **of)
        p.emit(
            "send",
            transfer=self._transfers,
            room=job.room,
            attempt=job.attempt,
            chunk=chunk,
            last=last,
            agent=p.agent,
            peer=d.agent,
            written=written,
            awaited=awaited,
            logical=logical[0],
            pages=source_pages if named is None else list(named),
            destination_pages=target_pages,
            item_lengths=[length[0]] * len(pairs or p.layers),
            source=np.array(source, np.uint64).reshape(-1, 2),
            destination=np.array(target, np.uint64).reshape(-1, 2),
            thread=wire,
        )
        p.emit(
            "transfer_state",
            state="posted",
            transfer=self._transfers,
            room=job.room,
            attempt=job.attempt,
            agent=p.agent,
            thread=wire,
        )
        pieces = [(*p.find(s), *d.find(t), n) for (s, n), (t, _) in zip(source, target, strict=True)]
        return Transfer(self._transfers, job, logical, pieces, p.seq)

    def land(
        self, transfer: Transfer, *, only: tuple[int, int] | None = None, pages: Sequence[int] = ()
    ) -> None:
        """The bytes of a transfer reach the destination, in descriptor order, as the source is now.

        ``only`` limits what lands to that byte range of the destination ``pages`` (physical); all else lands whole.
        """
        for layer, start, target, to, length in transfer.pieces:
            source = self.prefill.memory[layer].reshape(-1)[start : start + length]
            flat = self.decode.memory[target].reshape(-1)
            keep = np.ones(len(source), bool)
            if only is not None:
                where = np.arange(to, to + length)
                page, offset = np.divmod(where, layout(self.decode.format).page_bytes)
                keep = ~np.isin(page, list(pages)) | ((offset >= only[0]) & (offset < only[1]))
            flat[to : to + length][keep] = source[keep]

    def done(self, transfer: Transfer) -> None:
        """The sender sees the transfer complete."""
        p, job = self.prefill, transfer.job
        wire = 1 if self.threads else 0
        p.emit(
            "transfer_state",
            state="done",
            transfer=transfer.transfer,
            room=job.room,
            attempt=job.attempt,
            agent=p.agent,
            thread=wire,
        )
        p.snapshot(
            "SE",
            "after",
            job,
            transfer.logical,
            [job.prefill[k] for k in transfer.logical],
            rows=job.rows,
            transfer=transfer.transfer,
            thread=wire,
        )

    def send(self, job: Job, logical: Sequence[int] | None = None, **how: Any) -> None:
        """Post, land, done."""
        transfer = self.post(job, logical, **how)
        self.land(transfer)
        self.done(transfer)

    def tell(self, job: Job, who: str = "") -> None:
        """Prefill tells decode that the request is complete; ``who``: where the key says which rank told which."""
        self.edge(self.prefill, self.decode, "status", f"{job.key}/{who}" if who else job.key)

    def arrive(self, job: Job, *, first: int = 0, told: bool = False) -> None:
        """Decode learns that the request is complete (``told``: that was earlier) and looks at its pages."""
        d = self.decode
        if not told:
            self.tell(job)
        d.emit("transfer_state", state="arrived", room=job.room, attempt=job.attempt, agent=d.agent)
        self.look("RC", job, first=first)
        d.emit(
            "request",
            room=job.room,
            attempt=job.attempt,
            phase="arrived",
            tokens=job.rows,
            rows=job.rows,
        )

    def look(self, stage: str, job: Job, *, first: int = 0) -> None:
        """A snapshot of the destination pages of the prompt (RC or LT)."""
        logical = job.logical()[first:]
        pages = [job.decode[k] for k in logical]
        self.decode.snapshot(stage, "", job, logical, pages, rows=job.length)

    def read(
        self,
        job: Job,
        *,
        rows: int | None = None,
        table: Sequence[int] | None = None,
        pad: Sequence[int] = (),
        snapshot: bool = True,
        logits: bool = False,
        layers: Iterable[int] | None = None,
        change: Callable[[dict[str, Any]], None] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """The indexer reads ``rows`` rows through ``table``; ``pad`` are the unused table entries behind it.

        ``change`` alters what the kernel computed (query, weights, logits, top-k) before it is told; ``meanwhile`` is
        what happens on the host while the kernel runs.
        """
        d = self.decode
        rows = job.length if rows is None else rows
        logical = job.logical(rows)
        table = [job.decode[k] for k in logical] if table is None else list(table)
        chosen = d.layers if layers is None else tuple(layers)
        step = self.step()
        begin = d.seq + 1
        if snapshot:
            d.snapshot("RD", "before", job, logical, table, rows=rows, step=step, layers=chosen)
        stamp = {}
        if meanwhile:
            meanwhile()
            stamp = {"begin_seq": begin}
        for layer in chosen:
            more = kernel(d, layer, table, rows) if logits else {}
            if change:
                change(more)
            d.emit(
                "read",
                room=job.room,
                attempt=job.attempt,
                buffer=d.buffer(layer),
                step=step,
                rows=rows,
                table=[*table, *pad],
                table_after=[*table, *pad],
                **more,
                **stamp,
            )
        if snapshot:
            d.snapshot("RD", "after", job, logical, table, rows=rows, step=step, layers=chosen)

    def append(self, job: Job, count: int = 1) -> None:
        """Decode writes the next rows itself."""
        first = job.length
        job.appended += count
        self.store(job, first, job.length, side=self.decode)

    def free(self, side: Side, job: Job, reason: str = "finish", *, first: int = 0) -> None:
        pages = (job.prefill if side is self.prefill else job.decode)[first:]
        side.emit("request", room=job.room, attempt=job.attempt, phase=reason)
        side.emit("free", room=job.room, attempt=job.attempt, pages=list(pages), reason=reason)

    def finish(self, job: Job) -> None:
        """The request is over on both sides."""
        self.free(self.prefill, job)
        self.free(self.decode, job)

    # Whole stories

    def healthy(self, job: Job, *, finish: bool = False, reads: int = 1) -> Job:
        """A request from start to its first reads (or its end) with nothing wrong."""
        self.start(job)
        self.announce(job)
        self.store(job, 0, job.rows)
        self.send(job)
        self.arrive(job)
        self.look("LT", job)
        for _ in range(reads):
            self.read(job)
        if finish:
            self.finish(job)
        return job

    def earlier(self, prefill: Sequence[int], decode: Sequence[int], *, room: int = 9009) -> Job:
        """Request q9 has lived on these pages and is gone: its P(9, l, k) is their old content."""
        rows = pattern.ROWS * max(len(prefill), len(decode))
        return self.healthy(Job(room, 9, rows, list(prefill), list(decode)), finish=True)


def _rows(
    a: list[int], b: list[int], length: tuple[int, int], *, grouped: bool
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(address, length) rows of both sides; ``grouped`` joins neighbours as engines do."""
    source = [(address, length[0]) for address in a]
    target = [(address, length[1]) for address in b]
    if not grouped:
        return source, target
    x, y = source[:1], target[:1]
    for s, t in zip(source[1:], target[1:], strict=True):
        if sum(x[-1]) == s[0] and sum(y[-1]) == t[0]:
            x[-1] = (x[-1][0], x[-1][1] + s[1])
            y[-1] = (y[-1][0], y[-1][1] + t[1])
        else:
            x.append(s)
            y.append(t)
    return x, y
