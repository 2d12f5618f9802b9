"""The faults that the lab can run with, each as a policy that a real engine could have.

A fault is a constant, a missing wait or an early step on the engine's ordinary code path. Nothing is corrupted
afterwards, nothing reads the load, and the engine, its options and its events never say which policy is on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from capture_hooks.layouts import Layout


@dataclass(frozen=True, slots=True)
class Policy:
    """How the engine does what can be done wrongly. The defaults are right."""

    item_length: int | None = None  #: bytes a page that descriptors use; ``None`` = the pool's own
    await_stores: bool = True  #: the sender waits for the chunk's forward event before it posts
    tell: Literal["done", "posted"] = "done"  #: when the sender tells decode that all pages are there
    free_on_abort: Literal["acknowledged", "at-once"] = (
        "acknowledged"  #: when decode frees an aborted request
    )
    table_buffers: int = 2  #: step buffers for block tables
    positions: Literal["sequence", "chunk"] = "sequence"  #: what RoPE positions of a chunk are relative to
    read: Literal["plain", "tiled", "other-format"] = "plain"  #: which of the read kernels runs
    layers_sent: Literal["all", "without-last", "by-position"] = (
        "all"  #: which layers go to which of the receiver
    )
    list_pages: Literal["all", "whole"] = (
        "all"  #: whether a last page that is not full is in the list to send
    )
    half_pages: bool = False  #: a transfer moves half of each page, as if another rank sent the rest
    extra_rows: int = 0  #: rows that the length of every read is too long
    top_k: Literal["exact", "short", "coarse"] = "exact"  #: how the top-k is selected
    destination_ids: Literal["announced", "own"] = "announced"  #: whose page ids the sender writes to
    hold_source: Literal["done", "posted"] = "done"  #: until when a request's source pages are kept
    awaits: Literal["all", "pages"] = "all"  #: whether success waits for the component that goes apart
    on_error: Literal["tell", "ignore"] = "tell"  #: what the sender does about a transfer that failed
    clear_from: Literal["reply", "last-page"] = "reply"  #: first page that is cleared for the reply
    keep_shared: bool = True  #: a page stays while any request shares it, not only its first owner
    padding: Literal["skipped", "stored"] = "skipped"  #: what the store does with the padding of a batch
    metadata_slot: Literal["done", "posted"] = "done"  #: until when the sender keeps a metadata slot


@dataclass(frozen=True, slots=True)
class Fault:
    """One entry of ``replay demo --list-faults``."""

    kind: str
    about: str
    racy: bool  #: depends on timing
    policy: Callable[[Layout], Policy]
    #: Sizes of the demo (fields of ``LabConfig``) at which the load, not the wire, brings the race about.
    sizes: Mapping[str, float] = field(default_factory=dict)


#: Item length that the sender has hard-coded, by the format that the pool really has.
FOREIGN_ITEM = {"bf16": 8448, "fp8": 4352, "fp4": 4096}


def _wrong_item_length(layout: Layout) -> Policy:
    return replace(Policy(), item_length=FOREIGN_ITEM[layout.name])


FAULTS: dict[str, Fault] = {
    fault.kind: fault
    for fault in (
        Fault("none", "the engine as it should be", False, lambda _: Policy()),
        Fault(
            "wrong-item-length",
            "the sender computes addresses and lengths with another format's bytes per page",
            False,
            _wrong_item_length,
        ),
        Fault(
            "sent-before-written",
            "the sender does not wait for the forward event of the chunk it sends",
            True,
            lambda _: Policy(await_stores=False),
            {"wire_pages_s": 1200.0, "layer_ms": 4.0},
        ),
        Fault(
            "completion-early",
            "the sender tells success when the last chunk is posted, not when it is done",
            True,
            lambda _: Policy(tell="posted"),
        ),
        Fault(
            "late-foreign-write",
            "decode frees an aborted request's pages without waiting for the acknowledgement",
            True,
            lambda _: Policy(free_on_abort="at-once"),
        ),
        Fault(
            "torn-block-table",
            "one block-table buffer serves all steps: it is refilled while the last read still uses it",
            True,
            lambda _: Policy(table_buffers=1),
        ),
        Fault(
            "wrong-store-bytes",
            "a continued chunk is stored with positions counted from the chunk's own start",
            False,
            lambda _: Policy(positions="chunk"),
        ),
        Fault(
            "kernel-numerics",
            "the tiled read kernel uses one scale for all rows of a tile (bf16: drops the last heads)",
            False,
            lambda _: Policy(read="tiled"),
        ),
        Fault(
            "buffer-missing",
            "the sender's list of buffers leaves out the last layer",
            False,
            lambda _: Policy(layers_sent="without-last"),
        ),
        Fault(
            "wrong-layer-pairing",
            "the sender holds all layers but the first, and pairs them with the receiver's by position",
            False,
            lambda _: Policy(layers_sent="by-position"),
        ),
        Fault(
            "list-too-short",
            "the list of pages to send is made from the whole pages of a prompt: its last page is missing",
            False,
            lambda _: Policy(list_pages="whole"),
        ),
        Fault(
            "partial-slice",
            "the sender moves half of each page, as if another rank had the rest",
            False,
            lambda _: Policy(half_pages=True),
        ),
        Fault(
            "length-off-by-one",
            "the length given to the read kernel counts the row that is not there yet",
            False,
            lambda _: Policy(extra_rows=1),
        ),
        Fault(
            "number-format",
            "the read kernel decodes another number format: fp8 scales as powers of two, bf16 as fp16, fp4 exponents "
            "with another bias",
            False,
            lambda _: Policy(read="other-format"),
            {"top_k": 64},
        ),
        Fault(
            "invalid-top-k",
            "the selection leaves the last eighth of its slots unwritten",
            False,
            lambda _: Policy(top_k="short"),
            {"top_k": 64},
        ),
        Fault(
            "wrong-top-k",
            "the selection compares scores by their upper bits alone",
            False,
            lambda _: Policy(top_k="coarse"),
            {"top_k": 64},
        ),
        Fault(
            "wrong-page-id-space",
            "the sender writes to the page ids of its own pool instead of those that decode announced",
            False,
            lambda _: Policy(destination_ids="own"),
            {"prefill_pages": 200},  # every id of the sender is a page of the receiver
        ),
        Fault(
            "source-overwritten",
            "prefill gives a request's pages back when its last chunk is posted, not when it is done",
            True,
            lambda _: Policy(hold_source="posted"),
            {"prefill_pages": 60},
        ),
        Fault(
            "component-late",
            "the last layer goes as a component of its own, and success is told without waiting for it",
            True,
            lambda _: Policy(awaits="pages"),
            {"apart": 1},
        ),
        Fault(
            "failed-transfer-used",
            "the sender's peer is unknown to its library for a moment, and it takes the failed transfer for done",
            False,
            lambda _: Policy(on_error="ignore"),
            {"outages": 0.2},
        ),
        Fault(
            "local-clear",
            "decode clears the pages for a reply from the last page of the prompt on, not from the one after it",
            False,
            lambda _: Policy(clear_from="last-page"),
            {"clears": True},
        ),
        Fault(
            "freed-page-referenced",
            "decode gives a page back when its first owner ends, though others still share it as their prefix",
            True,
            lambda _: Policy(keep_shared=False),
            {"prefixes": 0.9, "decode_pages": 100, "wire_pages_s": 200.0},
        ),
        Fault(
            "padding-row-written",
            "the store does not skip slot -1 of a padded batch: it takes it for the last row of the last page",
            False,
            lambda _: Policy(padding="stored"),
            {"pads": 8},
        ),
        Fault(
            "metadata-mix-up",
            "prefill gives a request's metadata slot back when it is posted, not when it is done",
            True,
            lambda _: Policy(metadata_slot="posted"),
            {"metadata_slots": 64},
        ),
    )
}


def policy(kind: str, layout: Layout) -> Policy:
    """The policy of the fault ``kind`` for pages of ``layout``; ``ValueError`` names the known kinds otherwise."""
    try:
        return FAULTS[kind].policy(layout)
    except KeyError:
        raise ValueError(f"unknown fault {kind!r}; known: {', '.join(FAULTS)}") from None
