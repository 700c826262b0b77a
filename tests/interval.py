# SPDX-License-Identifier: MIT
"""Judges a quantised product whose sums may round differently, by an interval for every value.

The oracle has float64 values and a bound on what float32 sums can lose. Both ends of the interval
are quantised; between them every step is monotone. Where the ends agree, so must the code or scale
byte; where they do not (the exact value lies within the bound of a rounding boundary), it must lie
between them, and such places are counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rotquant_hip import reference

F64 = NDArray[np.float64]
GROUP = reference.GROUP


@dataclass(frozen=True)
class Values:
    """[rows, K]: the exact values and a bound on the error of each. Not finite: both are NaN."""

    exact: F64
    bound: F64

    @property
    def ends(self) -> tuple[F64, F64]:
        return self.exact - self.bound, self.exact + self.bound


def product(x: NDArray, matrix: NDArray, prescale: NDArray | None = None) -> Values:
    """x [rows, K] (float32) times prescale, times matrix [RS, RS] or [K / RS, RS, RS].

    The operands are bf16: both are rounded to it first.

    float32 sums of n exact products p, in any order, are within (n - 1) 2^-24 sum |p| of the exact
    sum to first order; n + 2 covers the higher orders. Each sum below the normal range may add half
    of the smallest subnormal. Zeros only add up to zero.
    """
    rows, k = x.shape
    size = matrix.shape[-1]

    def rounded(values: NDArray) -> F64:
        return reference.bf16_to_float32(reference.float32_to_bf16(values)).astype(np.float64)

    with np.errstate(all="ignore"):
        if prescale is not None:
            x = x * prescale
        blocks = rounded(x).reshape(rows, k // size, size)
        r = np.broadcast_to(rounded(matrix), (k // size, size, size))
        exact = np.einsum("mbi,bij->mbj", blocks, r).reshape(rows, k)
        sums = np.einsum("mbi,bij->mbj", np.abs(blocks), np.abs(r)).reshape(rows, k)
    bound = np.where(sums == 0, 0, (size + 2) * 2.0**-24 * sums + size * 2.0**-150)
    bad = ~np.isfinite(exact)
    return Values(np.where(bad, np.nan, exact), np.where(bad, np.nan, bound))


def through_bf16(values: Values) -> tuple[F64, F64]:
    """Both ends, rounded to bfloat16."""

    def rounded(end: F64) -> F64:
        bits = reference.float32_to_bf16(_float32(end))
        return reference.bf16_to_float32(bits).astype(np.float64)

    low, high = values.ends
    return rounded(low), rounded(high)


def assert_rounded(actual: NDArray, values: Values, round_to, what: str) -> None:
    """actual (as float32) lies between the rounded ends; NaN or Inf exactly where it has to."""
    low, high = (np.asarray(round_to(_float32(end)), np.float32) for end in values.ends)
    with np.errstate(invalid="ignore"):
        right = (low <= actual) & (actual <= high)
    right = np.where(np.isnan(values.exact), ~np.isfinite(actual), right)
    _none_wrong(right, f"{what}: output", actual, values.exact)


def assert_quantised(
    codes: NDArray, scales: NDArray, ends: tuple[F64, F64], scale_mode: str, what: str
) -> float:
    """Codes [rows, K / 2] and natural scales; returns the share of places with a choice."""
    low, high = (end.reshape(-1, GROUP) for end in ends)
    byte = scales.reshape(-1).astype(np.int32)
    nibbles = reference.unpack_nibbles(codes).reshape(-1, GROUP)
    bad = np.isnan(low).any(-1)
    _none_wrong((byte == 255) == bad, f"{what}: scale of a group that is not finite", byte, bad)
    _none_wrong(~nibbles[bad].any(-1), f"{what}: codes of such a group", byte[bad], byte[bad])
    low, high, byte, nibbles = low[~bad], high[~bad], byte[~bad], nibbles[~bad]

    choices = _judge_scales(byte, low, high, scale_mode, what)
    zero = np.maximum(np.abs(low), np.abs(high)).max(-1) == 0
    _none_wrong(
        ~nibbles[zero].any(-1), f"{what}: codes of a group of zeros", byte[zero], byte[zero]
    )
    low, high, byte, nibbles = low[~zero], high[~zero], byte[~zero], nibbles[~zero]
    unit = np.ldexp(1.0, byte - 127)[:, None]
    first, last = _rank(_encode(low / unit)), _rank(_encode(high / unit))
    rank = _rank(nibbles)
    _none_wrong((first <= rank) & (rank <= last), f"{what}: code", nibbles, (low + high) / 2 / unit)
    choices += np.count_nonzero(first != last)
    return choices / max(1, codes.size * 2 + scales.size)


def _judge_scales(byte: NDArray, low: F64, high: F64, scale_mode: str, what: str) -> int:
    largest = np.maximum(np.abs(low), np.abs(high)).max(-1)
    smallest = np.where((low <= 0) & (high >= 0), 0, np.minimum(np.abs(low), np.abs(high))).max(-1)
    mode = "round_up" if scale_mode == "mse" else scale_mode
    first = reference.scale_byte(_float32(smallest), mode).astype(np.int32)
    last = reference.scale_byte(_float32(largest), mode).astype(np.int32)
    if scale_mode == "mse":
        must, may = _lower_is_better((low + high) / 2, (high - low) / 2, last)
        first, last = first - (may & (first > 0)), last - (must & (first == last) & (last > 0))
    _none_wrong((first <= byte) & (byte <= last), f"{what}: scale", byte, largest)
    return np.count_nonzero(first != last)


def _lower_is_better(exact: F64, bound: F64, byte: NDArray) -> tuple[NDArray, NDArray]:
    """Whether byte - 1 must have the smaller squared error, and whether it may.

    The distance to the nearest code changes by no more than its argument does.
    """
    unit = np.ldexp(1.0, byte - 127)[:, None]
    t, slack = exact / unit, bound / unit
    here = np.abs(t - reference.e2m1_decode(_encode(t)))
    below = np.abs(t - reference.e2m1_decode(_encode(2 * t)) / 2.0)
    difference = (here**2 - below**2).sum(-1)
    uncertain = (2 * (here + below) * slack + 2 * slack**2).sum(-1)
    uncertain += 40 * 2.0**-24 * (here**2 + below**2).sum(-1)  # the float32 squares and their sum
    return difference > uncertain, difference > -uncertain


def _encode(values: F64) -> NDArray:
    return reference.e2m1_encode(values)


def _rank(codes: NDArray) -> NDArray:
    """Codes in the order of their values, -0 just below 0."""
    magnitude = (codes & 7) + 0.5
    return np.where(codes & 8, -magnitude, magnitude)


def _float32(values: F64) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def _none_wrong(right: NDArray, what: str, actual: NDArray, expected: NDArray) -> None:
    if right.all():
        return
    at = tuple(int(i) for i in np.argwhere(~right)[0])
    raise AssertionError(
        f"{what}: {np.count_nonzero(~right)} of {right.size} wrong, first at {at}: "
        f"got {actual[at]!r}, exact {expected[at]!r}"
    )
