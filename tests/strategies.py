# SPDX-License-Identifier: MIT
"""Hypothesis strategies that the op tests share.

An array is made by numpy from a drawn seed, which is fast; what is in it is drawn by name, so that
a failure shrinks towards one seed, one kind of group and a small shape. bfloat16 has no numpy type:
its arrays are uint16 bit patterns, and `to_float32` reads any of the three.
"""

from __future__ import annotations

from math import lcm, prod

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from rotquant_hip.reference import (
    E2M1_VALUES,
    GROUP,
    ROTATION_SIZES,
    SCALE_MODES,
    bf16_to_float32,
    e2m1_decode,
    e2m1_encode,
    float32_to_bf16,
)

DTYPES = ("bf16", "fp16", "fp32")
GROUP_KINDS = (
    "normal",
    "zero",
    "tiny",
    "huge",
    "midpoints",
    "edge",
    "impulse",
    "small_integers",
    "mse_tie",
    "any_bits",
)

dtypes = st.sampled_from(DTYPES)
rotation_sizes = st.sampled_from(ROTATION_SIZES)
scale_modes = st.sampled_from(SCALE_MODES)
seeds = st.integers(0, 2**32 - 1)

# Magnitudes around which each type is about to overflow or to lose bits.
_HUGE = {"bf16": (1e38,), "fp16": (2e4,), "fp32": (1e38,)}
_TINY = {"bf16": (1e-38, 1e-40), "fp16": (6e-5, 6e-7), "fp32": (1e-38, 1e-40)}
# Exponents e for which 7 * 2^e is finite; the lowest ones reach into the subnormals.
_EXPONENTS = {"bf16": (-133, 125), "fp16": (-22, 13), "fp32": (-148, 125)}


@st.composite
def shapes(draw, rotation_size: int = GROUP, max_elements: int = 4096) -> tuple[int, ...]:
    """1-D to 4-D shapes whose last dimension is a multiple of 32 and of rotation_size.

    Leading dimensions can be 0 or 1; the last is often no power of two.
    """
    step = lcm(GROUP, rotation_size)
    likely = [k for k in (96, 576, 1536) if k % step == 0 and k <= max_elements]
    multiples = st.integers(1, max(1, min(8, max_elements // step))).map(lambda n: n * step)
    k = draw(multiples | st.sampled_from(likely) if likely else multiples)
    leading: list[int] = []
    for _ in range(draw(st.integers(0, 3))):
        leading.append(draw(st.integers(0, min(40, max_elements // (k * prod(leading) or 1)))))
    return (*leading, k)


@st.composite
def float_arrays(draw, dtype: str, shape: tuple[int, ...] | None = None) -> NDArray:
    """Arrays of "bf16" (uint16 bits), "fp16" or "fp32" with the values that quantisers get wrong.

    Groups of 32 are of one to four drawn kinds. On top of it there may be a channel of outliers,
    and Inf or NaN at random places. The last dimension must be a multiple of 32.
    """
    shape = draw(shapes()) if shape is None else shape
    rng = np.random.default_rng(draw(seeds))
    kinds = draw(st.lists(st.sampled_from(GROUP_KINDS), min_size=1, max_size=4, unique=True))
    bits = _groups(rng, dtype, kinds, prod(shape) // GROUP).reshape(shape)
    if draw(st.booleans()):
        channel = rng.integers(shape[-1])
        outliers = to_float32(_from_bits(bits[..., channel], dtype))
        with np.errstate(all="ignore"):
            bits[..., channel] = _to_bits(outliers * np.float32(1000), dtype)
    if draw(st.booleans()):
        places = rng.random(shape) < draw(st.sampled_from((0.001, 0.02)))
        values = rng.choice([np.inf, -np.inf, np.nan], size=shape)
        bits = np.where(places, _to_bits(values, dtype), bits)
    return _from_bits(bits, dtype)


@st.composite
def prescales(draw, k: int) -> NDArray[np.float32]:
    """Per-channel factors [k]: random signs, or positive scales over a few binades."""
    rng = np.random.default_rng(draw(seeds))
    if draw(st.booleans()):
        return rng.choice(np.array([-1, 1], np.float32), k)
    return np.exp2(rng.standard_normal(k)).astype(np.float32)


@st.composite
def rotations(draw, rotation_size: int, blocks: int | None = None) -> NDArray[np.float32]:
    """Dense matrices [RS, RS], or with `blocks` a different one for each, [blocks, RS, RS].

    Of unit length on average; orthogonal would be slower to make and is no condition of any op.
    """
    rng = np.random.default_rng(draw(seeds))
    shape = (
        (rotation_size, rotation_size) if blocks is None else (blocks, rotation_size, rotation_size)
    )
    return (rng.standard_normal(shape) / np.sqrt(rotation_size)).astype(np.float32)


def mse_ties(rng: np.random.Generator, dtype: str, count: int) -> NDArray:
    """Groups [count, 32] whose squared errors at the scales 1 and 1/2 differ by rounding only.

    In float32, that is: there the order of the sum decides between the two scales.
    """
    t = rng.uniform(0, 3, (count, GROUP))
    t[:, 0] = 0
    error = ((t - _nearest_e2m1(t)) ** 2).sum(-1)
    error_below = ((t - _nearest_e2m1(2 * t) / 2) ** 2).sum(-1)
    # The largest element, 3 + y, loses 1 - y at scale 1 and y at scale 1/2, where it saturates:
    # the difference of the squares, 2y - 1, makes up for what the others gain there.
    t[:, 0] = 3 + np.clip((1 + error - error_below) / 2, 0.51, 0.99)
    return _from_bits(_to_bits(rng.permuted(t, axis=-1), dtype), dtype)


def to_float32(array: NDArray) -> NDArray[np.float32]:
    """A drawn array of any of the three types, exactly."""
    if array.dtype == np.uint16:
        return bf16_to_float32(array)
    with np.errstate(invalid="ignore"):  # widening a signalling NaN is no error here
        return array.astype(np.float32)


def _groups(rng: np.random.Generator, dtype: str, kinds: list[str], count: int) -> NDArray:
    """Bit patterns [count, 32], each row of one of the kinds."""
    kind_of_group = rng.integers(len(kinds), size=count)
    bits = np.zeros((count, GROUP), np.uint32 if dtype == "fp32" else np.uint16)
    for index, kind in enumerate(kinds):
        mine = kind_of_group == index
        bits[mine] = _groups_of_kind(rng, dtype, kind, np.count_nonzero(mine))
    return bits


def _groups_of_kind(rng: np.random.Generator, dtype: str, kind: str, count: int) -> NDArray:
    shape = (count, GROUP)
    sign = rng.choice([-1.0, 1.0], shape)
    match kind:
        case "normal":
            spread = np.exp2(rng.integers(-8, 4, (count, 1)))
            return _to_bits(rng.standard_normal(shape) * spread, dtype)
        case "zero":
            return _to_bits(sign * 0.0, dtype)
        case "tiny":
            size = rng.choice(_TINY[dtype], (count, 1))
            return _to_bits(rng.standard_normal(shape) * size, dtype)
        case "huge":
            size = rng.choice(_HUGE[dtype], (count, 1))
            return _to_bits(sign * rng.uniform(0, 3, shape) * size, dtype)
        case "small_integers":
            return _to_bits(rng.integers(-8, 9, shape).astype(np.float64), dtype)
        case "mse_tie":
            return _to_bits(to_float32(mse_ties(rng, "fp32", count)) * sign.astype("f4"), dtype)
        case "any_bits":
            kind_of_bits = np.uint32 if dtype == "fp32" else np.uint16
            return rng.integers(0, 2 ** (8 * kind_of_bits().itemsize), shape, kind_of_bits)
    # The rest are made of exact small values times one power of two for each group.
    scale = np.exp2(_exponents(rng, dtype, count))
    if kind == "midpoints":
        exact = np.concatenate([E2M1_VALUES, (E2M1_VALUES[1:] + E2M1_VALUES[:-1]) / 2])
        values = sign * rng.choice(exact.astype(np.float64), shape) * scale
        values[:, rng.integers(GROUP)] = 6 * scale[:, 0]  # makes 2^e the scale, so ties are ties
        return _to_bits(values, dtype)
    # The largest element at, just below or just above where some mode changes the scale.
    edge = rng.choice([4.0, 6.0, 7.0], (count, 1)) * scale
    others = np.zeros(shape) if kind == "impulse" else sign * rng.uniform(0, 0.99, shape) * edge
    bits = _to_bits(others, dtype)
    step = rng.integers(-1, 2, count).astype(bits.dtype)  # -1 wraps, and adding it subtracts 1
    bits[:, rng.integers(GROUP)] = _to_bits(edge[:, 0], dtype) + step
    return bits


def _exponents(rng: np.random.Generator, dtype: str, count: int) -> NDArray[np.float64]:
    """Exponents [count, 1], half of them moderate and half from the type's whole range."""
    low, high = _EXPONENTS[dtype]
    whole = rng.integers(low, high + 1, (count, 1))
    return np.where(rng.random((count, 1)) < 0.5, rng.integers(-6, 7, (count, 1)), whole) * 1.0


def _nearest_e2m1(values: NDArray) -> NDArray[np.float64]:
    return e2m1_decode(e2m1_encode(values)).astype(np.float64)


def _to_bits(values: NDArray, dtype: str) -> NDArray:
    with np.errstate(all="ignore"):
        match dtype:
            case "bf16":
                return float32_to_bf16(values)
            case "fp16":
                return np.asarray(values).astype(np.float16).view(np.uint16)
            case "fp32":
                return np.asarray(values).astype(np.float32).view(np.uint32)
    raise ValueError(f"dtype: expected one of {DTYPES}, got {dtype!r}")


def _from_bits(bits: NDArray, dtype: str) -> NDArray:
    return bits if dtype == "bf16" else bits.view(np.float16 if dtype == "fp16" else np.float32)
