from __future__ import annotations

import numpy as np
import pytest

from capture_hooks.digest import digest_pages
from capture_hooks.layouts import LAYOUTS


@pytest.mark.parametrize("pad", [0, 64])
@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_the_triton_twin_gives_the_same_bits_on_the_device(name: str, pad: int) -> None:
    torch = pytest.importorskip("torch")
    from capture_hooks.digest_triton import digest_pages_triton

    layout = LAYOUTS[name]
    pool = np.random.default_rng(5).integers(0, 256, (2000, layout.page_bytes + pad), dtype=np.uint8)
    pool[0], pool[1] = 0, 255
    numpy = digest_pages(layout, pool[:, : layout.page_bytes])
    on_device = torch.from_numpy(pool).to("cuda")
    digests, values, scales = digest_pages_triton(layout, on_device[:, : layout.page_bytes])
    assert np.array_equal(digests.cpu().numpy().view(np.uint64), numpy.digests)
    assert np.array_equal(values.cpu().numpy().view(np.uint64), numpy.row_values)
    assert np.array_equal(scales.cpu().numpy().view(np.uint32), numpy.row_scales)
