"""A read kernel of one's own, for pages in bf16: once as it should be, and once with a size left over from fp8."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

import torch
import triton
import triton.language as tl


@triton.jit
def paged_logits(cache, table, lengths, query, weights, logits, heads, pages, longest, PITCH: tl.constexpr):
    """One program for a page of a request: 64 rows of 128 bf16 values. ``PITCH``: bytes from a page to the next."""
    request, entry = tl.program_id(0), tl.program_id(1)
    rows, dims = tl.arange(0, 64), tl.arange(0, 128)
    here = entry * 64 + rows < tl.load(lengths + request)
    page = tl.load(table + request * pages + entry)
    place = cache + (page * (PITCH // 2) + rows * 128)[:, None] + dims
    codes = tl.load(place, mask=here[:, None], other=0).to(tl.int32)
    keys = (codes << 16).to(tl.float32, bitcast=True)  # a bf16 is the upper half of an fp32
    found = tl.zeros((64,), tl.float32)
    for head in range(heads):
        q = tl.load(query + (request * heads + head) * 128 + dims)
        score = tl.sum(keys * q, axis=1)
        found += tl.where(score > 0, score, 0.0) * tl.load(weights + request * heads + head)
    tl.store(logits + request * longest + entry * 64 + rows, found, mask=here)


def launch(pitch, cache, table, rows, query, weights):
    """Logits float32[B, longest]; those past a request's length are -inf."""
    longest = int(rows.max())
    table = table[:, : -(-longest // 64)].clamp(min=0).contiguous()
    logits = torch.full((len(rows), longest), -torch.inf, device=cache.device)
    paged_logits[tuple(table.shape)](
        cache.view(torch.int16), table, rows, query, weights, logits, query.shape[1], table.shape[1], longest,
        PITCH=pitch,
    )  # fmt: skip
    return logits


def read(layout, cache, table, rows, query, weights, k):
    """As it should be."""
    return launch(layout.page_bytes, cache, table, rows, query, weights), None


def read_with_a_leftover(layout, cache, table, rows, query, weights, k):
    """The same with the bytes of an fp8 page written into the code."""
    return launch(8448, cache, table, rows, query, weights), None
