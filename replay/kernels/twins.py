"""Torch twins of the Triton kernels: fast on a CPU, and for the store the same bytes as the kernel.

Operation order of the store (``replay/kernels/store.py`` follows it step by step, so that the bytes are equal
on the interpreter, on a CPU and on a GPU). All in fp32, every operation rounded on its own, no fused multiply-add:

1. squares; their sum as a binary tree that adds neighbours (elements 0+1, 2+3, ...; then sums 0+1, ...);
2. ``inverse = 1 / sqrt(sum * 2**-7 + epsilon)``, IEEE square root and division;
3. ``(key * inverse) * weight``;
4. rotation of pairs 32..63: ``a * cos - b * sin`` and ``a * sin + b * cos``, each product rounded;
5. seven Hadamard stages: neighbours (a, b) become a + b in the lower half and a - b in the upper half;
   after seven of them the natural (Sylvester) order is back; then times fp32(1 / sqrt(128));
6. the largest magnitude (an integer maximum of the bits), the scale, IEEE division by it, round to nearest even.

NaN is stored in one form only (0x7F, 0x7FC0, scale 0x7FC00000 or 0xFF): the sign of a NaN that arithmetic makes
differs between processors.
"""

from __future__ import annotations

import math

import torch

from capture_hooks.layouts import Layout
from replay.kernels import arguments

#: fp32(1 / sqrt(128))
HADAMARD_SCALE = 0.08838834764831845
#: fp32 bits of 1e-4, the least magnitude that sets a scale
LEAST_BITS = 0x38D1B717
NAN_BITS = 0x7FC00000
_INFINITY_BITS = 0x7F800000
_CHUNK = 2048  # rows at a time: their fp32 values (1 MiB) stay in the cache of one core
_READ_BYTES = 64 << 20  # working memory of one batch of a read


def rotate_hadamard(
    keys: torch.Tensor, rope: torch.Tensor, norm_weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """Steps 1 to 5: ``float32[n, 128]`` values that are to be quantised.

    ``keys`` float32[n, 128], ``rope`` float32[n, 64] with (cos, sin) of pair i at 2i and 2i + 1.
    """
    total = keys * keys
    while total.shape[1] > 1:
        total = total[:, 0::2] + total[:, 1::2]
    mean = total * (1.0 / keys.shape[1])
    epsilon32 = torch.tensor(epsilon, dtype=torch.float32, device=keys.device)
    # torch's fp32 root on a CPU is not always the nearest number (MKL); the root in double, rounded, is.
    root = torch.sqrt((mean + epsilon32).to(torch.float64)).to(torch.float32)
    inverse = torch.ones_like(mean) / root
    normed = (keys * inverse) * norm_weight
    values = normed.clone()
    head = keys.shape[1] - arguments.ROPE_DIM
    a, b = normed[:, head::2], normed[:, head + 1 :: 2]
    cos, sin = rope[:, 0::2], rope[:, 1::2]
    values[:, head::2] = a * cos - b * sin
    values[:, head + 1 :: 2] = a * sin + b * cos
    half = keys.shape[1] // 2
    for _ in range(int(math.log2(keys.shape[1]))):
        a, b = values[:, 0::2], values[:, 1::2]
        following = torch.empty_like(values)
        torch.add(a, b, out=following[:, :half])
        torch.sub(a, b, out=following[:, half:])
        values = following
    return values * HADAMARD_SCALE


def _magnitudes(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32) & 0x7FFFFFFF


def _e4m3(values: torch.Tensor) -> torch.Tensor:
    # torch's cast rounds to nearest even; it does not saturate, and need not: |value / scale| <= 448 (1 + 2**-23).
    codes = values.to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(torch.isnan(values), codes.new_tensor(0x7F), codes)


def _bf16(values: torch.Tensor) -> torch.Tensor:
    words = values.to(torch.bfloat16).view(torch.int16)
    words = torch.where(torch.isnan(values), words.new_tensor(0x7FC0), words)
    return words.view(torch.uint8)


def _e2m1(values: torch.Tensor) -> torch.Tensor:
    magnitude = values.abs()
    # Ties go to the even code: a threshold belongs to the upper side where the upper code is even.
    codes = torch.zeros_like(magnitude, dtype=torch.uint8)
    for threshold in (0.25, 1.25, 2.5, 5.0):
        codes += magnitude > threshold
    for threshold in (0.75, 1.75, 3.5):
        codes += magnitude >= threshold
    codes |= torch.signbit(values).to(torch.uint8) << 3
    return torch.where(torch.isnan(values), codes.new_tensor(7), codes)


def quantise(layout: Layout, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Step 6: ``(uint8[n, value_bytes], uint8[n, scale_bytes])`` of float32[n, 128] values."""
    count = len(values)
    if layout.value_type == "bf16":
        return _bf16(values), values.new_empty((count, 0), dtype=torch.uint8)
    groups = values.view(count, -1, layout.scale_block)
    largest = _magnitudes(groups).amax(dim=2, keepdim=True)
    bits = torch.clamp(largest, min=LEAST_BITS)
    bits = torch.where(largest > _INFINITY_BITS, NAN_BITS, bits).to(torch.int32)
    if layout.value_type == "e4m3":
        # The divisor is a tensor: for a number torch multiplies by its reciprocal on some devices.
        scale = bits.view(torch.float32) / torch.full_like(bits, 448, dtype=torch.float32)
        scale = torch.where(torch.isnan(scale), bits.new_tensor(NAN_BITS).view(torch.float32), scale)
        codes = _e4m3(groups / scale).view(count, -1)
        return codes, scale.view(count, 1).view(torch.uint8)
    # ceil(log2(x / 6)) without a division: x = m * 2**e gives e - 2 for m <= 1.5, else e - 1.
    nan = bits == NAN_BITS
    exponent = ((bits + 0x3FFFFF) >> 23) - 2
    exponent = torch.where(nan, 0xFF, exponent).to(torch.int32)
    inverse = ((254 - exponent.clamp(max=253)) << 23).view(torch.float32)
    codes = _e2m1(groups * inverse).view(count, -1)
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return packed, exponent.view(count, -1).to(torch.uint8)


def store_rows_torch(
    layout: Layout, keys: torch.Tensor, rope: torch.Tensor, norm_weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a store writes for each row: ``(uint8[n, value_bytes], uint8[n, scale_bytes])``.

    Arguments as for `store_torch`; they are not checked.
    """
    values = torch.empty((len(keys), layout.value_bytes), dtype=torch.uint8, device=keys.device)
    scales = torch.empty((len(keys), layout.scale_bytes), dtype=torch.uint8, device=keys.device)
    step = _CHUNK if keys.device.type == "cpu" else 1 << 18
    for start in range(0, len(keys), step):
        part = slice(start, start + step)
        rotated = rotate_hadamard(keys[part].contiguous(), rope[part], norm_weight, epsilon)
        values[part], scales[part] = quantise(layout, rotated)
    return values, scales


def store_torch(
    layout: Layout,
    cache: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    rope: torch.Tensor,
    norm_weight: torch.Tensor,
    epsilon: float,
) -> None:
    """Store rows into ``cache`` in place.

    Args:
        layout: page format.
        cache: uint8[pages, pitch]; the pitch may be larger than a page.
        slots: int64[n], ``page * layout.rows + row`` of each row; all different.
        keys: float32[n, 128] before RMSNorm.
        rope: float32[n, 64]: cos of pair i at 2i, sin at 2i + 1.
        norm_weight: float32[128].
        epsilon: of RMSNorm; rounded to fp32.

    Raises:
        ValueError: a slot outside the cache or twice, a wrong shape or dtype.
    """
    arguments.check_store(layout, cache, slots, keys, rope, norm_weight)
    values, scales = store_rows_torch(layout, keys, rope, norm_weight, epsilon)
    page, row = slots // layout.rows, slots % layout.rows
    # A view of each area, for a cache of any pitch: [pages, rows, bytes]
    shape, origin = (cache.shape[0], layout.rows), cache.storage_offset()
    for width, base, written in (
        (layout.value_bytes, 0, values),
        (layout.scale_bytes, layout.scale_base, scales),
    ):
        if width:
            area = cache.as_strided((*shape, width), (cache.stride(0), width, 1), origin + base)
            area[page, row] = written


def _e4m3_values(device: torch.device) -> torch.Tensor:
    codes = torch.arange(256, dtype=torch.int32)
    magnitude = codes & 0x7F
    bits = torch.where(magnitude >= 8, (magnitude << 20) + (120 << 23), 0).to(torch.int32)
    values = torch.where(magnitude >= 8, bits.view(torch.float32), magnitude.to(torch.float32) * 2.0**-9)
    values = torch.where(magnitude == 0x7F, torch.nan, values)
    return torch.where(codes >= 128, -values, values).to(device)


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decode_torch(layout: Layout, pages: torch.Tensor) -> torch.Tensor:
    """Keys of ``uint8[n, page_bytes]``: ``float32[n, rows, head_dim]``, value times scale rounded to float32."""
    count, rows = len(pages), layout.rows
    values = pages[:, : layout.scale_base].reshape(count, rows, layout.value_bytes)
    if layout.value_type == "bf16":
        return values.contiguous().view(torch.bfloat16).to(torch.float32)
    scales = (
        pages[:, layout.scale_base : layout.page_bytes].reshape(count, rows, layout.scale_bytes).contiguous()
    )
    if layout.value_type == "e4m3":
        decoded = _e4m3_values(pages.device).index_select(0, values.reshape(-1).to(torch.int32))
        return decoded.view(count, rows, layout.head_dim) * scales.view(torch.float32)
    nibbles = torch.stack([values & 15, values >> 4], dim=-1).view(-1).to(torch.int32)
    table = torch.tensor([*_E2M1, *(-v for v in _E2M1)], dtype=torch.float32, device=pages.device)
    decoded = table.index_select(0, nibbles).view(count, rows, layout.scale_bytes, layout.scale_block)
    codes = scales.to(torch.int32)
    bits = torch.where(codes == 0, 0x00400000, codes << 23)
    bits = torch.where(codes == 0xFF, NAN_BITS, bits).to(torch.int32)
    return (decoded * bits.view(torch.float32)[..., None]).view(count, rows, layout.head_dim)


def top_k_torch(logits: torch.Tensor, rows: torch.Tensor, k: int) -> torch.Tensor:
    """Row indices of the ``k`` largest logits of each request, ties to the lower index: ``int32[B, k]``, -1 padded.

    ``logits`` float32[B, maxrows] with -inf past the length, ``rows`` int64[B].
    """
    # A stable sort is the one selection in torch whose order of equal values is defined.
    order = torch.sort(logits, dim=1, descending=True, stable=True).indices[:, :k].to(torch.int32)
    found = torch.full((len(logits), k), -1, dtype=torch.int32, device=logits.device)
    found[:, : order.shape[1]] = order
    count = torch.clamp(rows, max=k).to(logits.device)
    found[torch.arange(k, device=logits.device) >= count[:, None]] = -1
    return found


def _batches(longest: list[int], layout: Layout, heads: int) -> list[tuple[int, int]]:
    """Consecutive requests whose padded working memory stays within the limit: half-open ranges."""
    ranges: list[tuple[int, int]] = []
    begin = 0
    widest = 0
    for index, pages in enumerate(longest):
        widest = max(widest, pages)
        row_bytes = layout.head_dim * 9 + heads * 8
        if index > begin and (index + 1 - begin) * widest * layout.rows * row_bytes > _READ_BYTES:
            ranges.append((begin, index))
            begin, widest = index, pages
    if longest:
        ranges.append((begin, len(longest)))
    return ranges


def read_torch(
    layout: Layout,
    cache: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    query: torch.Tensor,
    weights: torch.Tensor,
    k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of every row of each request, and the top-k.

    ``logits[t, j] = sum_h weights[t, h] * relu(sum_d query[t, h, d] * key[t, j, d])``.

    Args:
        layout: page format.
        cache: uint8[pages, pitch].
        table: int64[B, maxpages]; entry p holds rows ``p * layout.rows`` onwards. Entries past the length are ignored.
        rows: int64[B], length of each request in rows.
        query: float32[B, H, 128].
        weights: float32[B, H].
        k: of top-k.

    Returns:
        ``(float32[B, maxrows], int32[B, k])`` with ``maxrows = max(rows)``; logits past the length are -inf, the
        top-k is ordered by falling logit, ties to the lower index, and padded with -1.

    Raises:
        ValueError: a used page id outside the cache, a length past the table, a wrong shape or dtype.
    """
    arguments.check_read(layout, cache, table, rows, query, weights, k)
    lengths = rows.tolist()
    longest = max(lengths, default=0)
    logits = torch.full((len(lengths), longest), -torch.inf, dtype=torch.float32, device=cache.device)
    counts = [-(-length // layout.rows) for length in lengths]
    for begin, end in _batches(counts, layout, query.shape[1]):
        width = max(counts[begin:end])
        if width == 0:
            continue
        used = torch.arange(width, device=table.device) * layout.rows < rows[begin:end, None]
        pages = torch.where(used, table[begin:end, :width], 0)
        gathered = cache[pages.reshape(-1), : layout.page_bytes]
        keys = decode_torch(layout, gathered).view(end - begin, width * layout.rows, layout.head_dim)
        scores = torch.relu_(torch.bmm(query[begin:end], keys.transpose(1, 2)))
        summed = torch.bmm(weights[begin:end, None], scores)[:, 0]
        longest_here = max(lengths[begin:end])
        part = logits[begin:end, :longest_here]
        valid = torch.arange(longest_here, device=rows.device) < rows[begin:end, None]
        part.copy_(torch.where(valid, summed[:, :longest_here], -torch.inf))
    return logits, top_k_torch(logits, rows, k)
