"""The records: one frozen, slotted dataclass a kind of event.

These classes are the single source of the journal encoding, the tables of the HDF5 trace, the keyword
arguments of ``TraceBuilder`` and the field table in ``replay/trace/SPEC.md``. Scalars are ``int``,
``float``, ``bool`` or ``str``; arrays are numpy arrays declared with :func:`records.array`.

Words: a *page* is a physical page id inside a buffer; *logical* is the index of a page within its request
(logical page k holds rows ``k * rows_per_page`` onwards); a *row* or *slot* is ``page * rows_per_page + row``;
*room* is the id that both sides give a request (``bootstrap_room``) and *attempt* counts reuses of a room id.
``-1`` means "not known" for every id.

Every record carries a :class:`records.Stamp`: which thread made it, its place in that process's sequence, and the
interval that it covers. Sequence numbers of one thread are ordered; across threads and processes only
:class:`Order` records order anything (``replay/order.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from capture_hooks.records import Event, array

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class Process(Event):
    """First record of every journal: who recorded it."""

    KIND: ClassVar[int] = 1
    TABLE: ClassVar[str] = "process"
    role: str  #: "prefill", "decode" or "server"
    rank: int = 0
    run: str = ""  #: random run id, unique to this process
    host: str = ""  #: one-way digest of the machine's boot id: equal iff clocks are comparable
    engine: str = ""  #: e.g. "lab", "sglang 0.5.23"
    mode: str = ""  #: capture mode: digest, pages, full
    transport: str = ""  #: e.g. "nixl/UCX", "tcp"
    options: str = ""  #: JSON: effective options
    environment: str = ""  #: JSON: versions, device, architecture


@dataclass(frozen=True, slots=True, eq=False)
class Hook(Event):
    """State of one hook; the last record of a name holds. Absence is evidence only where a writer's hook is
    attached and ``complete``.
    """

    KIND: ClassVar[int] = 2
    TABLE: ClassVar[str] = "hook"
    name: str  #: e.g. "lab.pool.store"
    #: What a judge asks for: "store", "alloc", "send", "receive", "completion", "read", "top-k", "copy" or "metadata".
    #: Hooks that nothing is concluded from say in a word of their own what they see ("order", "alarm", ...).
    covers: str = ""
    state: str = "attached"  #: "attached", "missing", "refused", "detached"
    fired: int = 0
    complete: bool = True  #: sees every event of this kind in this process
    note: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Buffer(Event):
    """One paged buffer: one layer of one cache."""

    KIND: ClassVar[int] = 3
    TABLE: ClassVar[str] = "buffer"
    buffer: int  #: id of the buffer within its process
    name: str = "index_k"
    layer: int = 0  #: global layer id
    format: str = "fp8"  #: a name of ``layouts.LAYOUTS``, or ``layouts.OPAQUE``
    address: int = 0
    pages: int = 0
    pitch: int = 0  #: bytes from a page to the next
    item_length: int = 0  #: bytes a page that the engine tells the transfer
    tokens_per_row: int = 4
    memory: str = "DRAM"  #: "DRAM" or "VRAM"


@dataclass(frozen=True, slots=True, eq=False)
class Registration(Event):
    """Memory made known to the transfer library."""

    KIND: ClassVar[int] = 4
    TABLE: ClassVar[str] = "registration"
    agent: str  #: name of the local agent
    address: int = 0
    length: int = 0
    device: int = 0
    memory: str = "DRAM"


@dataclass(frozen=True, slots=True, eq=False)
class Request(Event):
    """A step in a request's life."""

    KIND: ClassVar[int] = 5
    TABLE: ClassVar[str] = "request"
    room: int
    attempt: int = 0
    phase: str = "start"  #: "start", "arrived" (decode may read it), "finish", "abort", "fail"
    rid: str = ""  #: one-way hash of the client's request id
    tokens: int = -1  #: prompt tokens
    rows: int = -1  #: valid rows of the prompt; rows past it are nobody's claim
    mark: str = ""  #: "warmup", "health", "fake" or ""
    req_pool_idx: int = -1  #: its row in the engine's table of requests (SGLang's ``req_to_token``)
    generation: int = -1  #: how many times this process had handed that row out before


@dataclass(frozen=True, slots=True, eq=False)
class Alloc(Event):
    """Pages given to a request: ``pages[i]`` becomes its logical page ``logical + i``."""

    KIND: ClassVar[int] = 6
    TABLE: ClassVar[str] = "alloc"
    room: int
    attempt: int = 0
    logical: int = 0
    pages: I64 = array("<i8", None)
    shared: bool = False  #: shared prefix: the request references the pages but does not own them alone


@dataclass(frozen=True, slots=True, eq=False)
class Free(Event):
    """Pages given back."""

    KIND: ClassVar[int] = 7
    TABLE: ClassVar[str] = "free"
    room: int
    attempt: int = 0
    pages: I64 = array("<i8", None)
    reason: str = ""  #: "finish", "abort", "evict"


@dataclass(frozen=True, slots=True, eq=False)
class StoreParams(Event):
    """Constants of a store that many stores share (RMSNorm weight and epsilon)."""

    KIND: ClassVar[int] = 8
    TABLE: ClassVar[str] = "store_params"
    params: int
    norm_weight: F32 = array("<f4", None, bulk=True)  #: float32[head_dim]
    epsilon: float = 1e-6
    rope_dim: int = 64  #: the last ``rope_dim`` dimensions are rotated: interleaved (real, imaginary) pairs


@dataclass(frozen=True, slots=True, eq=False)
class Store(Event):
    """Rows written by a store kernel. Without ``keys`` the store was seen but its inputs were not kept.

    ``slots`` are what the kernel was given, padding rows of the batch included; a padding row has ``logical_rows`` -1.
    """

    KIND: ClassVar[int] = 9
    TABLE: ClassVar[str] = "store"
    room: int
    attempt: int = 0
    buffer: int = -1
    step: int = -1
    params: int = -1
    slots: I64 = array("<i8", None)  #: physical slot of each row
    positions: I64 = array("<i8", None)  #: token position given to RoPE
    logical_rows: I64 = array("<i8", None)  #: row index within the request
    keys: F32 = array("<f4", None, 128, bulk=True)  #: the store's input, before RMSNorm
    rope: F32 = array("<f4", None, 64, bulk=True)  #: (cos, sin) of each pair at the row's right position
    stride: int = -1  #: bytes from a page to the next in the view that the kernel was given
    mapping: int = -1  #: version of the slot translation (:class:`Mapping`) that ``slots`` came from
    draft: bool = False  #: rows of speculative tokens, not accepted yet


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot(Event):
    """Pages as seen at one stage.

    ``stage``: ST after the store, SE source at send, RC destination when reception is complete, LT destination
    a little later, RD destination at a read. ``moment``: ST "" and "copied" (after a :class:`Copy` filled the pages);
    SE "before" the post and "after" completion; RC "before" the transfer (the old content) and "" (at completion);
    LT "" a little later, "copied", and "end" just before the pages are given back; RD "before" and "after" the kernel.

    ``row_values`` holds a 64-bit digest of each row's value bytes, ``row_scales`` the scale bytes themselves
    (``digest.py``); ``data`` the page bytes where they were kept.
    """

    KIND: ClassVar[int] = 10
    TABLE: ClassVar[str] = "snapshot"
    stage: str
    moment: str = ""
    room: int = -1
    attempt: int = 0
    buffer: int = -1
    transfer: int = -1
    step: int = -1
    rows: int = -1  #: rows of the request that exist at this moment (its length in rows); -1 = not told
    logical: I64 = array("<i8", None)
    pages: I64 = array("<i8", None)
    digests: U64 = array("<u8", None, 2)
    row_values: U64 = array("<u8", None, None)
    row_scales: U32 = array("<u4", None, None)
    data: U8 = array("|u1", None, None, bulk=True)


@dataclass(frozen=True, slots=True, eq=False)
class Receive(Event):
    """The decode side announces its destination pages for a request (they may be written from now on)."""

    KIND: ClassVar[int] = 11
    TABLE: ClassVar[str] = "receive"
    room: int
    attempt: int = 0
    logical: int = 0
    pages: I64 = array("<i8", None)
    buffers: I64 = array("<i8", None)  #: buffer ids that are to be filled
    item_lengths: I64 = array("<i8", None)  #: bytes a page the receiver expects, one per buffer


@dataclass(frozen=True, slots=True, eq=False)
class Send(Event):
    """A transfer was posted: its descriptors, as given to the wire.

    ``source``/``destination`` rows are (address, length); the destination addresses belong to the process whose
    agent is ``peer``. ``written`` is what ``event.query()`` said about the last store to the source pages when the
    transfer was posted: 1 finished, 0 not finished, -1 not asked.
    """

    KIND: ClassVar[int] = 12
    TABLE: ClassVar[str] = "send"
    transfer: int  #: id of the transfer, unique within its process
    room: int = -1
    attempt: int = 0
    chunk: int = -1
    last: bool = False
    agent: str = ""  #: name of the posting agent
    peer: str = ""  #: name of the peer agent
    operation: str = "WRITE"
    written: int = -1
    awaited: int = -1  #: 1: somebody waited for that store before the post, 0: nobody did, -1 not known
    logical: int = -1  #: first logical page of this chunk
    pages: I64 = array("<i8", None)  #: source pages named by the engine
    destination_pages: I64 = array("<i8", None)  #: destination pages named by the engine
    item_lengths: I64 = array("<i8", None)  #: bytes a page that made the descriptors, one per source buffer
    source: U64 = array("<u8", None, 2)
    destination: U64 = array("<u8", None, 2)


@dataclass(frozen=True, slots=True, eq=False)
class TransferState(Event):
    """A change of state of a transfer, as one side learned it.

    ``state``: "posted", "done", "error", "released" (sender, by transfer id); "arrived" (receiver was told that
    the request is complete), "aborted", "acknowledged" (receiver knows that no write of the room is in flight).
    After "done" and "error" the transfer writes nothing any more; "released" alone does not say so. Where the library
    raised for a transfer that may still be on its way, it is "posted" once more, with what was raised as ``detail``.
    """

    KIND: ClassVar[int] = 13
    TABLE: ClassVar[str] = "transfer_state"
    state: str
    transfer: int = -1
    room: int = -1
    attempt: int = 0
    agent: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Order(Event):
    """One end of an order edge made by the protocol: everything up to the ``tail`` record on its thread happened
    before everything after the ``head`` record with the same ``what`` and ``key`` on its own.

    ``what``: "announce" (destination pages told), "status" (completion told), "abort", "ack", "queue" (hand-over
    between threads of a process), "sync" (a stream or event was waited for). The ``key`` of the first four is
    ``ROOM.ATTEMPT``, or ``ROOM.ATTEMPT/WHO`` where several ranks tell each other: the same ``WHO`` at both ends.
    """

    KIND: ClassVar[int] = 14
    TABLE: ClassVar[str] = "order"
    what: str
    key: str
    end: str  #: "tail" or "head"


@dataclass(frozen=True, slots=True, eq=False)
class Read(Event):
    """One query row of the indexer's read in one layer, as the kernel saw it.

    ``table`` are the physical pages for rows ``0 .. rows-1``. ``query`` is ``float32[heads * head_dim]`` flattened,
    with exactly the values the kernel used; logits are ``sum_h weights[h] * relu(query[h] . key[row])``.
    """

    KIND: ClassVar[int] = 15
    TABLE: ClassVar[str] = "read"
    room: int
    attempt: int = 0
    buffer: int = -1
    step: int = -1
    rows: int = 0  #: length in rows as the kernel saw it
    table: I64 = array("<i8", None)
    table_after: I64 = array("<i8", None)  #: the same entries once the kernel was over; empty = not taken
    k: int = -1  #: top-k asked for
    kernel: str = ""  #: kernel that computed it: "triton", "torch", ...
    query: F32 = array("<f4", None, bulk=True)
    weights: F32 = array("<f4", None, bulk=True)
    logits: F32 = array("<f4", None, bulk=True)
    top_k: I32 = array("<i4", None, bulk=True)
    stride: int = -1  #: bytes from a page to the next in the view that the kernel was given
    mapping: int = -1  #: version of the slot translation (:class:`Mapping`) that ``table`` came from
    #: Type tags that the kernel was given: "e4m3fn/fp32", "e4m3fnuz/fp32", "bf16", "fp16", ...
    number_format: str = ""
    #: Rows this query may see: those accepted, and in a verify step the drafted ones before it.
    accepted: int = -1
    drafted: int = -1  #: rows the request has with all drafted ones


@dataclass(frozen=True, slots=True, eq=False)
class Loss(Event):
    """Something that was not kept. Counted per stage; ``first_seq``/``last_seq`` bound where it is missing."""

    KIND: ClassVar[int] = 16
    TABLE: ClassVar[str] = "loss"
    stage: str  #: "hook", "queue", "disk", "ring", "journal"
    what: str = ""  #: table name of what was lost, "" = any
    count: int = 0
    first_seq: int = -1
    last_seq: int = -1
    reason: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Trigger(Event):
    """Somebody asked for the bytes to be kept."""

    KIND: ClassVar[int] = 17
    TABLE: ClassVar[str] = "trigger"
    reason: str
    room: int = -1
    attempt: int = 0
    rid: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Clock(Event):
    """Both clocks at one moment, and proof of life: written at start, at each flush of the journal and at the end."""

    KIND: ClassVar[int] = 18
    TABLE: ClassVar[str] = "clock"
    moment: str  #: "start", "alive", "end"
    monotonic_ns: int = 0
    wall_ns: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Content(Event):
    """Page bytes written out later than the snapshots that saw them (the ring, after a trigger)."""

    KIND: ClassVar[int] = 19
    TABLE: ClassVar[str] = "content"
    format: str = ""  #: page format, a name of ``layouts.LAYOUTS``
    digests: U64 = array("<u8", None, 2)
    data: U8 = array("|u1", None, None, bulk=True)


@dataclass(frozen=True, slots=True, eq=False)
class Copy(Event):
    """Pages or rows copied within one process: to a host tier and back, or moved; or cleared by the engine itself.

    Entry i copies ``length`` bytes from ``source_ids[i] * source_stride`` of ``source_buffer`` to ``ids[i] * stride``
    of ``buffer``. A buffer -1 is memory that no :class:`Buffer` declares, such as a host tier: its ids mean something
    only within the ``copy`` records of one process that have the same name and layer at the other end. The hook tells
    what the copy was given, not what it should have been given.
    """

    KIND: ClassVar[int] = 20
    TABLE: ClassVar[str] = "copy"
    operation: str  #: "offload", "load-back", "move" or "clear" (nothing is read: no source)
    room: int = -1
    attempt: int = 0
    source_buffer: int = -1
    buffer: int = -1
    unit: str = "page"  #: what the caller's ids count: "page" or "row"
    source_ids: I64 = array("<i8", None)
    ids: I64 = array("<i8", None)
    logical: I64 = array("<i8", None)  #: logical page (or row) of each id within the request
    length: int = -1  #: bytes copied for each id
    source_stride: int = -1  #: bytes from an id to the next at the source
    stride: int = -1  #: bytes from an id to the next at the destination
    step: int = -1


@dataclass(frozen=True, slots=True, eq=False)
class Mapping(Event):
    """The translation of a request's logical pages to physical ones, as made for kernels: one record a version.

    Stores and reads name the version that they used; a later version of a process replaces an earlier one of the same
    request. ``pages[i]`` is where logical page ``logical + i`` lies.
    """

    KIND: ClassVar[int] = 21
    TABLE: ClassVar[str] = "mapping"
    version: int
    room: int = -1
    attempt: int = 0
    logical: int = 0
    pages: I64 = array("<i8", None)


@dataclass(frozen=True, slots=True, eq=False)
class Metadata(Event):
    """A step in the life of a metadata slot: the few numbers beside the pages that prefill sends for a request.

    ``holds`` is the room id found in the slot, never what else it holds (tokens are not recorded). A slot that was
    given back keeps its old id until it is written anew.
    """

    KIND: ClassVar[int] = 22
    TABLE: ClassVar[str] = "metadata"
    moment: str  #: "given", "written" (prefill filled its own slot), "sent", "read" (decode took it), "freed"
    room: int = -1  #: the request that it is for
    attempt: int = 0
    slot: int = -1  #: slot in this process
    peer_slot: int = -1  #: slot at the receiver ("sent")
    holds: int = -1  #: room id in the slot at this moment; -1 = none or not looked at


@dataclass(frozen=True, slots=True, eq=False)
class Trim(Event):
    """The trace was cut down on purpose (``replay trim``). What was left out is scope, not loss: everything that a
    verdict on what the fields name needs was kept. One record a process; empty fields set no limit.
    """

    KIND: ClassVar[int] = 23
    TABLE: ClassVar[str] = "trim"
    run: str  #: the same in all processes that were cut down together
    rooms: I64 = array("<i8", None)
    layers: I64 = array("<i8", None)
    logical: I64 = array("<i8", None)  #: logical pages
    stages: str = ""  #: stages of the ladder, joined by commas
    choice: str = ""  #: what was asked for, in words
    left_out: int = 0  #: records of this process that were left out


EVENTS: tuple[type[Event], ...] = (
    Process, Hook, Buffer, Registration, Request, Alloc, Free, StoreParams, Store, Snapshot, Receive, Send,
    TransferState, Order, Read, Loss, Trigger, Clock, Content, Copy, Mapping,
    Metadata, Trim,
)  # fmt: skip
BY_KIND: dict[int, type[Event]] = {event.KIND: event for event in EVENTS}
BY_TABLE: dict[str, type[Event]] = {event.TABLE: event for event in EVENTS}
