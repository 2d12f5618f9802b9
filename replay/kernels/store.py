"""The store as a Triton kernel: RMSNorm, rotation, Hadamard, quantisation, scatter into the pages.

Every operation and its order is the one of ``twins.py``, each rounded on its own (``enable_fp_fusion=False``, IEEE
square root and division), so the bytes equal the twin's on the interpreter and on a GPU. Set ``TRITON_INTERPRET``
before this module is imported, or call `replay.kernels.launch.prepare`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl

from capture_hooks.layouts import Layout
from replay.kernels import arguments, launch
from replay.kernels.bits import encode_bf16, encode_e2m1, encode_e4m3

#: Whether this process interprets its Triton kernels (decided when triton was imported).
INTERPRETED = launch.interpreted()
# The interpreter pays for each operation of a program, a GPU for each row of it.
_ROWS = 256 if INTERPRETED else 16


@triton.jit
def _rotate_hadamard(
    keys, rope, weights, start, count, epsilon, ROWS: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr
):
    # Steps 1 to 5 of twins.py for rows start .. start + ROWS; rows past `count` come out as 0.
    row = start + tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    here = row[:, None] < count
    x = tl.load(keys + row[:, None].to(tl.int64) * DIM + dim[None, :], mask=here, other=0.0)
    width: tl.constexpr = DIM // 2
    first, second = tl.split(tl.reshape(x * x, (ROWS, width, 2)))
    total = first + second
    for i in tl.static_range(6):
        first, second = tl.split(tl.reshape(total, (ROWS, DIM >> (2 + i), 2)))
        total = first + second
    mean = tl.reshape(total, (ROWS,)) * (1.0 / DIM)
    root = tl.sqrt_rn(mean + epsilon)
    inverse = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), root)
    y = (x * inverse[:, None]) * tl.load(weights + dim)[None, :]
    a, b = tl.split(tl.reshape(y, (ROWS, width, 2)))
    pair = tl.arange(0, width)[None, :]
    rotated = pair >= width - ROPE // 2
    angle = rope + row[:, None].to(tl.int64) * ROPE + (pair - (width - ROPE // 2)) * 2
    cos = tl.load(angle, mask=here & rotated, other=1.0)
    sin = tl.load(angle + 1, mask=here & rotated, other=0.0)
    real = tl.where(rotated, a * cos - b * sin, a)
    imaginary = tl.where(rotated, a * sin + b * cos, b)
    z = tl.reshape(tl.permute(tl.join(real + imaginary, real - imaginary), (0, 2, 1)), (ROWS, DIM))
    for _ in tl.static_range(6):
        a, b = tl.split(tl.reshape(z, (ROWS, width, 2)))
        z = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (ROWS, DIM))
    return z * 0.08838834764831845


@triton.jit
def _magnitude_bits(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _store_kernel(
    cache,
    slots,
    keys,
    rope,
    weights,
    count,
    epsilon,
    pitch,
    KIND: tl.constexpr,  # 0 e4m3 with an fp32 scale, 1 bf16, 2 e2m1 with ue8m0 scales
    PAGE_ROWS: tl.constexpr,
    VALUE_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
):
    start = tl.program_id(0) * ROWS
    z = _rotate_hadamard(keys, rope, weights, start, count, epsilon, ROWS, DIM, ROPE)
    row = start + tl.arange(0, ROWS)
    here = row < count
    slot = tl.load(slots + row, mask=here, other=0)
    page = cache + (slot // PAGE_ROWS) * pitch
    values = page + (slot % PAGE_ROWS) * VALUE_BYTES
    scales = page + PAGE_ROWS * VALUE_BYTES + (slot % PAGE_ROWS) * SCALE_BYTES
    dim = tl.arange(0, DIM)[None, :]
    if KIND == 1:
        code = encode_bf16(z)
        words = values.to(tl.pointer_type(tl.int16), bitcast=True)
        tl.store(words[:, None] + dim, code.to(tl.int16), mask=here[:, None])
    elif KIND == 0:
        largest = tl.max(_magnitude_bits(z), axis=1)
        bits = tl.maximum(largest, 0x38D1B717)  # 1e-4
        scale = tl.div_rn(bits.to(tl.float32, bitcast=True), tl.full((ROWS,), 448.0, tl.float32))
        word = tl.where(largest > 0x7F800000, 0x7FC00000, scale.to(tl.int32, bitcast=True))
        code = encode_e4m3(tl.div_rn(z, tl.broadcast_to(scale[:, None], (ROWS, DIM))))
        tl.store(values[:, None] + dim, code.to(tl.uint8), mask=here[:, None])
        tl.store(scales.to(tl.pointer_type(tl.int32), bitcast=True), word, mask=here)
    else:
        groups: tl.constexpr = SCALE_BYTES
        grouped = tl.reshape(z, (ROWS, groups, DIM // groups))
        largest = tl.max(_magnitude_bits(grouped), axis=2)
        nan = largest > 0x7F800000
        # ceil(log2(x / 6)) without a division: x = m * 2**e gives e - 2 for m <= 1.5, else e - 1
        bits = tl.minimum(tl.maximum(largest, 0x38D1B717), 0x7F800000)
        exponent = ((bits + 0x3FFFFF) >> 23) - 2
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        scaled = tl.reshape(grouped * inverse[:, :, None], (ROWS, DIM // 2, 2))
        even, odd = tl.split(encode_e2m1(scaled))
        half = tl.arange(0, DIM // 2)[None, :]
        tl.store(values[:, None] + half, (even | (odd << 4)).to(tl.uint8), mask=here[:, None])
        group = tl.arange(0, groups)[None, :]
        exponent = tl.where(nan, 0xFF, exponent)
        tl.store(scales[:, None] + group, exponent.to(tl.uint8), mask=here[:, None])


KINDS = {"e4m3": 0, "bf16": 1, "e2m1": 2}


def store(
    layout: Layout,
    cache: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    rope: torch.Tensor,
    norm_weight: torch.Tensor,
    epsilon: float,
) -> None:
    """Store rows into ``cache`` in place with the Triton kernel.

    Arguments, errors and bytes are those of `replay.kernels.twins.store_torch`; pages must start on a multiple of
    4 bytes. Against `replay.kernels.reference.check_store` the rows are reproduced (bound in that module).
    """
    arguments.check_store(layout, cache, slots, keys, rope, norm_weight)
    arguments.check_aligned(cache)
    if not len(slots):
        return
    grid = (triton.cdiv(len(slots), _ROWS),)
    with launch.launching(cache.device.type, not INTERPRETED):
        _store_kernel[grid](
            cache,
            slots.contiguous(),
            keys.contiguous(),
            rope.contiguous(),
            norm_weight.contiguous(),
            len(slots),
            epsilon,
            cache.stride(0),
            KIND=KINDS[layout.value_type],
            PAGE_ROWS=layout.rows,
            VALUE_BYTES=layout.value_bytes,
            SCALE_BYTES=layout.scale_bytes,
            ROWS=_ROWS,
            DIM=layout.head_dim,
            ROPE=arguments.ROPE_DIM,
            enable_fp_fusion=False,
        )
