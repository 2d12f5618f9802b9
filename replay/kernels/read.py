"""The read as a Triton kernel: paged logits ``sum_h weights[h] * relu(query[h] . key[row])`` from the page bytes.

Keys are decoded by integer operations and multiplied in fp32 (``input_precision="ieee"``): right on the interpreter
and on a GPU. Sums are fp32 in an order that Triton chooses, so results agree with the reference within its bound and
not bit for bit. Set ``TRITON_INTERPRET`` before this module is imported, or call `replay.kernels.launch.prepare`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl

from capture_hooks.layouts import Layout
from replay.kernels import arguments, launch
from replay.kernels.bits import decode_bf16, decode_e2m1, decode_e4m3, decode_ue8m0
from replay.kernels.store import INTERPRETED, KINDS
from replay.kernels.twins import top_k_torch

# Pages that one program reads: the interpreter pays for each operation, not for its size.
_PAGES = 16 if INTERPRETED else 1
# With 4 warps, or 128 heads at once, the fp32 products of 64 rows no longer fit in the registers of an H200.
_HEAD_BLOCK, _WARPS = 64, 8


@triton.jit
def _decode_keys(base, row, mask, KIND: tl.constexpr, PAGE_ROWS: tl.constexpr, DIM: tl.constexpr):
    # Keys float32[len(row), DIM]; base: pointer to each row's page, row: index in its page
    dim = tl.arange(0, DIM)[None, :]
    if KIND == 0:
        code = tl.load((base + row * DIM)[:, None] + dim, mask=mask, other=0).to(tl.int32)
        word = (base + PAGE_ROWS * DIM + row * 4).to(tl.pointer_type(tl.float32), bitcast=True)
        return decode_e4m3(code) * tl.load(word[:, None], mask=mask, other=0.0)
    elif KIND == 1:
        word = (base + row * (DIM * 2)).to(tl.pointer_type(tl.int16), bitcast=True)
        return decode_bf16(tl.load(word[:, None] + dim, mask=mask, other=0).to(tl.int32))
    else:
        packed = tl.load((base + row * (DIM // 2))[:, None] + dim // 2, mask=mask, other=0).to(tl.int32)
        scales = (base + PAGE_ROWS * (DIM // 2) + row * (DIM // 32))[:, None] + dim // 32
        scale = decode_ue8m0(tl.load(scales, mask=mask, other=0).to(tl.int32))
        return decode_e2m1((packed >> ((dim % 2) * 4)) & 15) * scale


@triton.jit
def _read_kernel(
    cache,
    table,
    lengths,
    query,
    weights,
    logits,
    pitch,
    table_stride,
    logits_stride,
    heads,
    KIND: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,  # heads, rounded up to a power of two
    HEAD_BLOCK: tl.constexpr,
    PAGES: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    block: tl.constexpr = PAGES * PAGE_ROWS
    row = tl.program_id(1) * block + tl.arange(0, block)
    length = tl.load(lengths + request)
    here = row < length
    # int64 throughout: page * pitch passes 2**31 at 254,200 fp8 pages
    page = tl.load(table + request * table_stride + row // PAGE_ROWS, mask=here, other=0)
    keys = _decode_keys(cache + page * pitch, row % PAGE_ROWS, here[:, None], KIND, PAGE_ROWS, DIM)
    dim = tl.arange(0, DIM)
    result = tl.zeros((block,), tl.float32)
    for first in range(0, HEADS, HEAD_BLOCK):
        head = first + tl.arange(0, HEAD_BLOCK)
        there = head < heads
        place = (request * heads + head[:, None]) * DIM + dim[None, :]
        q = tl.load(query + place, mask=there[:, None], other=0.0)
        w = tl.load(weights + request * heads + head, mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
        # A comparison instead of a maximum: NaN stays NaN, as in relu
        scores = tl.where(scores < 0.0, 0.0, scores)
        result += tl.sum(scores * w[:, None], axis=0)
    tl.store(logits + request * logits_stride + row, result, mask=here)


def read(
    layout: Layout,
    cache: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    query: torch.Tensor,
    weights: torch.Tensor,
    k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and top-k of each request with the Triton kernel.

    Arguments, results and errors are those of `replay.kernels.twins.read_torch`; pages must start on a multiple of 4
    bytes. Logits are within the bound of `replay.kernels.reference.logits_reference` (fp32 sums). The top-k is
    taken from them by a stable sort.
    """
    arguments.check_read(layout, cache, table, rows, query, weights, k)
    arguments.check_aligned(cache)
    batch, longest = len(rows), int(rows.max()) if len(rows) else 0
    logits = torch.full((batch, longest), -torch.inf, dtype=torch.float32, device=cache.device)
    if longest:
        heads = max(16, triton.next_power_of_2(query.shape[1]))  # 16 is the least that a dot product takes
        grid = (batch, triton.cdiv(longest, _PAGES * layout.rows))
        with launch.launching(cache.device.type, not INTERPRETED):
            _read_kernel[grid](
                cache,
                table.contiguous(),
                rows.contiguous(),
                query.contiguous(),
                weights.contiguous(),
                logits,
                cache.stride(0),
                table.shape[1],
                longest,
                query.shape[1],
                KIND=KINDS[layout.value_type],
                PAGE_ROWS=layout.rows,
                DIM=layout.head_dim,
                HEADS=heads,
                HEAD_BLOCK=min(heads, _HEAD_BLOCK),
                PAGES=_PAGES,
                num_warps=_WARPS,
                enable_fp_fusion=False,
            )
    return logits, top_k_torch(logits, rows, k)
