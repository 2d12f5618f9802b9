"""What lets a tiny DeepSeek-V4 with dummy weights run in SGLang 0.5.16 without TileLang: a plug-in for this test only.

It replaces the mixing kernel of the hyper-connections and the filler of dummy weights (the stock one makes norm weights
near zero). Neither touches the cache, the transfer or the indexer.
"""

from __future__ import annotations

import zlib
from typing import Any


def register() -> None:
    """Entry point of ``sglang.srt.plugins``."""
    _replace_mixing()
    _replace_weights()


def _replace_mixing() -> None:
    import sglang.kernels.ops.layernorm.mhc as module
    import triton
    import triton.language as tl

    @triton.jit
    def mix(given, scale, base, before, after, matrix, epsilon, ROUNDS: tl.constexpr):  # noqa: N803
        token = tl.program_id(0).to(tl.int64)
        lane = tl.arange(0, 4)
        square = lane[:, None] * 4 + lane[None, :]
        source = given + token * 24
        first = tl.load(source + lane) * tl.load(scale) + tl.load(base + lane)
        second = tl.load(source + 4 + lane) * tl.load(scale + 1) + tl.load(base + 4 + lane)
        third = tl.load(source + 8 + square) * tl.load(scale + 2) + tl.load(base + 8 + square)
        tl.store(before + token * 4 + lane, tl.sigmoid(first) + epsilon)
        tl.store(after + token * 4 + lane, 2.0 * tl.sigmoid(second))
        third = tl.exp(third - tl.max(third, 1)[:, None])
        third = third / tl.sum(third, 1)[:, None] + epsilon
        third = third / (tl.sum(third, 0)[None, :] + epsilon)
        for _ in range(ROUNDS - 1):
            third = third / (tl.sum(third, 1)[:, None] + epsilon)
            third = third / (tl.sum(third, 0)[None, :] + epsilon)
        tl.store(matrix + token * 16 + square, third)

    def hc_split_sinkhorn(
        mixes: Any, hc_scale: Any, hc_base: Any, hc_mult: int = 4, sinkhorn_iters: int = 20, eps: float = 1e-6
    ) -> Any:
        if hc_mult != 4:
            raise ValueError("this stand-in mixes 4 streams")
        mixes = mixes.contiguous()
        rows, columns, _ = mixes.shape
        before, after = (mixes.new_empty(rows, columns, 4) for _ in range(2))
        matrix = mixes.new_empty(rows, columns, 4, 4)
        if rows * columns:
            mix[(rows * columns,)](
                mixes, hc_scale, hc_base, before, after, matrix, eps, sinkhorn_iters, num_warps=1
            )
        return before, after, matrix

    module.hc_split_sinkhorn = hc_split_sinkhorn


def _replace_weights() -> None:
    import sglang.srt.model_loader.loader as loader
    import torch

    def fill(model: Any, *_: Any, **__: Any) -> None:
        with torch.no_grad():
            for name, weight in model.state_dict().items():
                if not torch.is_floating_point(weight):
                    continue
                if weight.dim() == 1 and "norm" in name:
                    weight.fill_(1.0)
                elif weight.dim() == 1 and "hc_" in name and "scale" in name:
                    weight.fill_(0.1)
                elif "bias" in name or "attn_sink" in name or (weight.dim() == 1 and "hc_" in name):
                    weight.zero_()
                else:
                    seed = torch.Generator(device=weight.device)
                    seed.manual_seed(zlib.crc32(name.encode()))
                    spread = 0.02 if "embed" in name else weight.shape[-1] ** -0.5
                    whole = torch.float32 if weight.numel() < 2**28 else torch.bfloat16
                    weight.copy_(
                        torch.empty(weight.shape, dtype=whole, device=weight.device).normal_(
                            0.0, spread, generator=seed
                        )
                    )

    loader.initialize_dummy_weights = fill
