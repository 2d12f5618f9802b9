"""Casts and dot products of the Triton that runs here, compared with the definitions in ``formats.py``.

Triton's interpreter computes some of them wrongly (3.6 and 3.9: fp32 to e4m3 loses the rounding carry and does not
saturate, fp32 to bf16 truncates, bf16 arithmetic and dot products give nonsense, the e4m3 NaN reads as 480). The
kernels of this package use none of those. A user's kernel may: where it used one that is wrong here, what it
computed says nothing about it, and it is not judged.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"
# ruff: noqa: N803

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from replay.kernels import formats, launch

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Conversion:
    """One cast or kind of arithmetic, and whether it is right here."""

    name: str
    right: bool
    detail: str = ""  #: the first wrong result, or why it could not run


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """What was found, and on what."""

    engine: str  #: "interpreter of Triton 3.9.0", "NVIDIA H200, Triton 3.6.0"
    interpreted: bool
    conversions: tuple[Conversion, ...]

    @property
    def wrong(self) -> tuple[str, ...]:
        """Names of the conversions that are wrong or unavailable here."""
        return tuple(c.name for c in self.conversions if not c.right)

    def affected(self, used: Iterable[str]) -> tuple[str, ...]:
        """Those of ``used`` that cannot be trusted here: found wrong, or not among those checked."""
        right = {c.name for c in self.conversions if c.right}
        return tuple(sorted(name for name in set(used) if name not in right))


@triton.jit
def _cast_down(source, target, TO: tl.constexpr, BITS: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(target + at, tl.load(source + at).to(TO).to(BITS, bitcast=True))


@triton.jit
def _cast_up(source, target, FROM: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(target + at, tl.load(source + at).to(FROM, bitcast=True).to(tl.float32))


@triton.jit
def _add(left, right, target, TYPE: tl.constexpr, BITS: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    a = tl.load(left + at).to(TYPE, bitcast=True)
    b = tl.load(right + at).to(TYPE, bitcast=True)
    tl.store(target + at, (a + b).to(BITS, bitcast=True))


@triton.jit
def _dot(left, right, target, TYPE: tl.constexpr, N: tl.constexpr):
    # left [N, N] times the transpose of right [N, N]
    at = tl.arange(0, N)
    a = tl.load(left + at[:, None] * N + at[None, :]).to(TYPE, bitcast=True)
    b = tl.load(right + at[None, :] * N + at[:, None]).to(TYPE, bitcast=True)
    tl.store(target + at[:, None] * N + at[None, :], tl.dot(a, b, input_precision="ieee"))


@triton.jit
def _root(source, target, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(source + at)
    tl.store(target + at, tl.div_rn(tl.full((N,), 1.0, tl.float32), tl.sqrt_rn(x)))


def _numbers(count: int) -> npt.NDArray[np.float32]:
    """fp32 numbers of all sizes that matter here, with a full significand."""
    rng = np.random.default_rng(20)
    exponent = rng.integers(127 - 10, 127 + 8, count).astype(np.uint32)
    bits = (rng.integers(0, 2, count).astype(np.uint32) << 31) | (exponent << 23)
    return (bits | rng.integers(0, 1 << 23, count).astype(np.uint32)).view(np.float32)


def _pad(values: Array, count: int) -> Array:
    return np.resize(values, count)


def _launch(kernel: Any, inputs: list[Array], like: Array, device: str, **constants: Any) -> Array:
    tensors = [torch.from_numpy(x).to(device) for x in inputs]
    target = torch.from_numpy(np.zeros_like(like)).to(device)
    with launch.launching(device, not launch.interpreted()), np.errstate(all="ignore"):
        kernel[(1,)](*tensors, target, **constants)
    return target.cpu().numpy()


def _cases(device: str) -> Iterator[tuple[str, Callable[[], tuple[Array, Array]]]]:
    """Name of each conversion, and a function that gives (result here, right result)."""
    count = 256
    # 0.97 and 1.99 round up into the next exponent; multiples of 2**-10 are subnormal; the rest are ties
    carry = np.array(
        [0.97, 1.99, 15.7, 247.0, -0.99, 3.97, 0.0146, 0.0009, 17.0, 19.0, 0.00146484375], np.float32
    )
    usual = np.concatenate([carry, _numbers(count)])[:count]
    usual = np.where(np.abs(usual) < 440, usual, np.float32(1.1)).astype(np.float32)
    high = _pad(np.array([449, 460, 500, 1e4, 1e30, -470, -3e38, np.inf, -np.inf], np.float32), count)
    codes = np.arange(count, dtype=np.uint8)
    nan_code = (codes & 0x7F) == 0x7F
    numbers = np.where(nan_code, np.uint8(0x38), codes)
    words = formats.encode_bf16(_numbers(count)).view(np.int16)
    others = formats.encode_bf16(_numbers(2 * count)[count:]).view(np.int16)

    def down(values: Array, kind: Any, bits: Any, right: Array) -> tuple[Array, Array]:
        return _launch(_cast_down, [values], right, device, TO=kind, BITS=bits, N=count), right

    def up(stored: Array, kind: Any, right: Array) -> tuple[Array, Array]:
        right = right.astype(np.float32)
        return _launch(_cast_up, [stored], right, device, FROM=kind, N=count), right

    def addition() -> tuple[Array, Array]:
        a, b = (formats.decode_bf16(x.view(np.uint16)) for x in (words, others))
        right = formats.encode_bf16((a + b).astype(np.float32)).view(np.int16)
        return _launch(_add, [words, others], right, device, TYPE=tl.bfloat16, BITS=tl.int16, N=count), right

    def product(
        kind: Any, size: int, encode: Callable[[Array], Array], decode: Callable[[Array], Array]
    ) -> Any:
        # Small integers: exact in every format and every order of summation.
        rng = np.random.default_rng(21)
        a, b = (encode(rng.integers(-8, 9, (size, size)).astype(np.float32)) for _ in range(2))
        right = (decode(a) @ decode(b).T).astype(np.float32)
        return _launch(_dot, [a, b], right, device, TYPE=kind, N=size), right

    def root() -> tuple[Array, Array]:
        values = np.abs(_numbers(count))
        right = np.float32(1) / np.sqrt(values)
        return _launch(_root, [values], right, device, N=count), right

    yield (
        "fp32 to e4m3",
        lambda: down(usual, tl.float8e4nv, tl.uint8, formats.encode_e4m3(usual)),
    )
    yield (
        "fp32 to e4m3 past 448",
        lambda: down(high, tl.float8e4nv, tl.uint8, formats.encode_e4m3(high)),
    )
    yield "e4m3 to fp32", lambda: up(numbers, tl.float8e4nv, formats.E4M3[numbers])
    yield "e4m3 NaN to fp32", lambda: up(_pad(codes[nan_code], count), tl.float8e4nv, np.full(count, np.nan))
    yield (
        "fp32 to bf16",
        lambda: down(usual, tl.bfloat16, tl.int16, formats.encode_bf16(usual).view(np.int16)),
    )
    yield "bf16 to fp32", lambda: up(words, tl.bfloat16, formats.decode_bf16(words.view(np.uint16)))
    yield "bf16 arithmetic", addition
    yield (
        "bf16 dot product",
        lambda: product(
            tl.bfloat16,
            16,
            lambda x: formats.encode_bf16(x).view(np.int16),
            lambda x: formats.decode_bf16(x.view(np.uint16)),
        ),
    )
    yield "e4m3 dot product", lambda: product(tl.float8e4nv, 32, formats.encode_e4m3, formats.decode_e4m3)
    yield (
        "fp32 dot product",
        lambda: product(tl.float32, 16, lambda x: x, lambda x: x.astype(np.float64)),
    )
    yield "fp32 root and division", root


def self_check(device: str | None = None) -> SelfCheck:
    """Run every cast and dot product here and compare it with its definition.

    Args:
        device: "cuda" or "cpu"; None for what `launch.prepare` chose.
    """
    device = device or launch.prepare()
    interpreted = launch.interpreted()
    found = []
    for name, run in _cases(device):
        try:
            got, right = run()
        except Exception as error:  # a cast that this device or this Triton does not have
            first = (str(error).strip().splitlines() or [""])[0]
            found.append(Conversion(name, False, f"not available: {type(error).__name__}: {first}"[:200]))
            continue
        differs = ~((got == right) | (np.isnan(got) & np.isnan(right)))
        found.append(Conversion(name, not differs.any(), _first_wrong(got, right, differs)))
    engine = f"Triton {triton.__version__}"
    engine = f"interpreter of {engine}" if interpreted else f"{torch.cuda.get_device_name()}, {engine}"
    return SelfCheck(engine, interpreted, tuple(found))


def _first_wrong(got: Array, right: Array, differs: Array) -> str:
    if not differs.any():
        return ""
    place = tuple(int(i[0]) for i in np.nonzero(differs))
    as_text = [f"{x[place]:#06x}" if x.dtype.kind in "iu" else f"{x[place]:.6g}" for x in (got, right)]
    return f"{int(differs.sum())} of {differs.size} wrong, the first is {as_text[0]} instead of {as_text[1]}"


def _kind_of(dtype: Any) -> str:
    return {"fp8e4nv": "e4m3", "bf16": "bf16", "fp32": "fp32"}.get(str(dtype), str(dtype))


@contextlib.contextmanager
def watching() -> Iterator[set[str]]:
    """Collect the names of the doubtful conversions that interpreted kernels make inside the block.

    Names are those of `self_check`, others (such as "fp16 to e4m3") where it has none; conversions between types that
    the interpreter leaves to numpy are not collected. Empty on a GPU.

    Raises:
        RuntimeError: this Triton's interpreter is built differently and cannot be watched.
    """
    used: set[str] = set()
    if not launch.interpreted():
        yield used
        return
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    names = ("cast_impl", "create_fp_to_fp", "binary_op", "create_dot")
    try:
        originals = {name: getattr(builder, name) for name in names}
    except AttributeError as error:
        raise RuntimeError(
            f"the interpreter of Triton {triton.__version__} cannot be watched: {error}"
        ) from error

    def note_cast(source: Any, target: Any) -> None:
        before, after = (_kind_of(t.scalar) for t in (source.dtype, target))
        if before == after or not ({before, after} & {"e4m3", "bf16"} or "fp8" in before + after):
            return
        used.add(f"{before} to {after}")
        if before == "e4m3" and bool(((source.data.view(np.uint8) & 0x7F) == 0x7F).any()):
            used.add("e4m3 NaN to fp32")
        if after == "e4m3" and bool((np.abs(source.data.astype(np.float64)) > formats.E4M3_MAX).any()):
            used.add("fp32 to e4m3 past 448")

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        note_cast(source, target)
        return originals["cast_impl"](self, source, target)

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        note_cast(source, target)
        return originals["create_fp_to_fp"](self, source, target, rounding)

    def binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
        kind = _kind_of(left.dtype.scalar)
        if kind == "bf16" or "fp8" in kind or kind == "e4m3":
            used.add(f"{kind} arithmetic")
        return originals["binary_op"](self, left, right, op)

    def create_dot(self: Any, left: Any, right: Any, *rest: Any) -> Any:
        for kind in {_kind_of(x.dtype.scalar) for x in (left, right)} - {"fp16", "fp64"}:
            used.add(f"{kind} dot product")
        return originals["create_dot"](self, left, right, *rest)

    try:
        for name, wrapper in zip(names, (cast_impl, create_fp_to_fp, binary_op, create_dot), strict=True):
            setattr(builder, name, wrapper)
        yield used
    finally:
        for name in names:
            setattr(builder, name, originals[name])
