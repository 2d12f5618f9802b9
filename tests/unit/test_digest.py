from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from capture_hooks.digest import digest_pages, page_digests
from capture_hooks.layouts import LAYOUTS, Layout

MASK = 2**64 - 1
FORMATS = sorted(LAYOUTS)


def random_pages(layout: Layout, count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, layout.page_bytes), dtype=np.uint8)


def mix(word: int) -> int:
    word &= MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def by_hand(layout: Layout, page: bytes) -> tuple[list[int], list[int], list[int]]:
    """The digests of one page in plain integers, written from the definition."""
    values, scales = [], []
    for row in range(layout.rows):
        start, stop = layout.value_range(row, row)
        total = 0
        for index in range((stop - start) // 8):
            word = int.from_bytes(page[start + 8 * index : start + 8 * index + 8], "little")
            total += mix(word + (index + 1) * 0x9E3779B97F4A7C15)
        values.append(total & MASK)
        start, stop = layout.scale_range(row, row)
        scales.append(int.from_bytes(page[start:stop], "little"))
    digest = []
    for seed in (0xD1B54A32D192ED03, 0x8CB92BA72F3D8DD7):
        total = 0
        for row in range(layout.rows):
            total += mix(values[row] + (2 * row + 1) * seed) + mix(scales[row] + (2 * row + 2) * seed)
        digest.append(total & MASK)
    return digest, values, scales


@pytest.mark.parametrize("name", FORMATS)
def test_the_numpy_digest_follows_the_definition(name: str) -> None:
    layout = LAYOUTS[name]
    pages = random_pages(layout, 3)
    pages[1] = 0
    pages[2] = 255
    found = digest_pages(layout, pages)
    for index, page in enumerate(pages):
        digest, values, scales = by_hand(layout, page.tobytes())
        assert found.digests[index].tolist() == digest
        assert found.row_values[index].tolist() == values
        assert found.row_scales[index].tolist() == scales


def test_the_digest_of_a_known_page_never_changes() -> None:
    """Traces hold these numbers: a change here is a change of the file format."""
    layout = LAYOUTS["fp8"]
    page = (np.arange(layout.page_bytes) % 251).astype(np.uint8)[None]
    found = digest_pages(layout, page)
    assert [f"{half:016x}" for half in found.digests[0]] == ["605aa59e416c8bc2", "ed1f551984e146f4"]
    assert f"{found.row_values[0, 63]:016x}" == "3d6feec779de25af"
    assert f"{found.row_scales[0, 1]:08x}" == "a7a6a5a4"


@pytest.mark.parametrize("name", FORMATS)
def test_pages_apart_give_the_digests_of_pages_together(name: str) -> None:
    layout = LAYOUTS[name]
    pool = np.random.default_rng(3).integers(0, 256, (9, layout.page_bytes + 192), dtype=np.uint8)
    apart = pool[1::2, : layout.page_bytes]
    together = digest_pages(layout, np.ascontiguousarray(apart))
    found = digest_pages(layout, apart)
    assert np.array_equal(found.digests, together.digests)
    assert np.array_equal(found.row_values, together.row_values)
    assert np.array_equal(found.row_scales, together.row_scales)


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_do_not_show_in_the_result(name: str) -> None:
    layout = LAYOUTS[name]
    pages = random_pages(layout, 150)
    together = digest_pages(layout, pages)
    for index in (0, 31, 32, 33, 127, 128, 149):
        alone = digest_pages(layout, pages[index : index + 1])
        assert np.array_equal(alone.digests[0], together.digests[index])
        assert np.array_equal(alone.row_values[0], together.row_values[index])


def test_no_pages_have_no_digests() -> None:
    layout = LAYOUTS["fp8"]
    found = digest_pages(layout, np.zeros((0, layout.page_bytes), np.uint8))
    assert found.digests.shape == (0, 2)
    assert found.row_values.shape == (0, 64)
    assert found.row_scales.shape == (0, 64)


def test_formats_without_scales_have_zero_scale_words() -> None:
    layout = LAYOUTS["bf16"]
    assert not digest_pages(layout, random_pages(layout, 2)).row_scales.any()


@pytest.mark.parametrize(
    "pages",
    [np.zeros((2, 8447), np.uint8), np.zeros((2, 8448), np.int8), np.zeros(8448, np.uint8)],
    ids=["length", "dtype", "dimensions"],
)
def test_other_shapes_are_refused(pages: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"expected pages of format fp8 as uint8\[n, 8448\]"):
        digest_pages(LAYOUTS["fp8"], pages)


def test_row_digests_and_scales_of_different_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="one shape"):
        page_digests(np.zeros((2, 64), np.uint64), np.zeros((2, 63), np.uint32))


def test_temporary_memory_does_not_grow_with_the_number_of_pages() -> None:
    layout = LAYOUTS["fp8"]
    pages = random_pages(layout, 1500)
    digest_pages(layout, pages[:1])
    tracemalloc.start()
    found = digest_pages(layout, pages)
    kept = sum(part.nbytes for part in (found.digests, found.row_values, found.row_scales))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak - kept < 2 * 2**20


TWIN = """
import json, sys
import numpy as np, torch
from capture_hooks.digest import digest_pages
from capture_hooks.digest_triton import digest_pages_triton
from capture_hooks.layouts import LAYOUTS
torch.set_num_threads(1)
rng = np.random.default_rng(7)
equal = {}
for layout in LAYOUTS.values():
    for pad in (0, 64):
        pool = rng.integers(0, 256, (4, layout.page_bytes + pad), dtype=np.uint8)
        pool[0], pool[1] = 0, 255
        pages = pool[:, : layout.page_bytes]
        numpy = digest_pages(layout, pages)
        digests, values, scales = digest_pages_triton(layout, torch.from_numpy(pool)[:, : layout.page_bytes])
        equal[f"{layout.name}+{pad}"] = bool(
            np.array_equal(digests.numpy().view(np.uint64), numpy.digests)
            and np.array_equal(values.numpy().view(np.uint64), numpy.row_values)
            and np.array_equal(scales.numpy().view(np.uint32), numpy.row_scales)
        )
refused = 0
layout = LAYOUTS["fp8"]
pool = torch.zeros((3, layout.page_bytes + 4), dtype=torch.uint8)
for wrong in (pool[:, : layout.page_bytes], pool, pool.to(torch.int8)[:, : layout.page_bytes]):
    try:
        digest_pages_triton(layout, wrong)
    except ValueError:
        refused += 1
empty = digest_pages_triton(layout, torch.zeros((0, layout.page_bytes), dtype=torch.uint8))
print(json.dumps({"equal": equal, "refused": refused, "empty": [list(part.shape) for part in empty]}))
"""


def test_the_triton_twin_gives_the_same_bits_on_the_interpreter() -> None:
    environ = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", TWIN],
        capture_output=True,
        text=True,
        timeout=120,
        env=environ,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["equal"] == {f"{name}+{pad}": True for name in LAYOUTS for pad in (0, 64)}
    assert answer["refused"] == 3
    assert answer["empty"] == [[0, 2], [0, 64], [0, 64]]


def test_the_numpy_digest_does_not_import_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys, capture_hooks.digest; print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
        check=True,
    )
    assert done.stdout.strip() == "False"
