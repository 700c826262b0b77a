# SPDX-License-Identifier: MIT
"""Assertions on arrays that say how many elements are wrong, and where.

They take numpy arrays, or anything that `numpy.asarray` turns into one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def assert_bytes_equal(actual: ArrayLike, expected: ArrayLike, what: str) -> None:
    """Same dtype, shape and bytes; so 0 differs from -0, and one NaN from another."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    _assert_same_form(actual, expected, what)
    wrong = _bits(actual) != _bits(expected)
    if not wrong.any():
        return
    # The integer distance of bit patterns: in codes, scale steps or units in the last place.
    distance = np.abs(_bits(actual).astype(object) - _bits(expected).astype(object))
    worst = np.argmax(distance.ravel() == distance.max())
    raise AssertionError(
        f"{what}: {np.count_nonzero(wrong)} of {wrong.size} differ"
        f"\n  first {_describe(actual, expected, int(np.argmax(wrong)))}"
        f"\n  worst {_describe(actual, expected, int(worst))}"
    )


def assert_close(
    actual: ArrayLike, expected: ArrayLike, what: str, *, bound: ArrayLike = 0.0
) -> None:
    """Same shape and |actual - expected| <= bound, with NaN and Inf in the same places.

    bound is absolute and broadcasts: make one from the data for a relative bound.
    """
    with np.errstate(invalid="ignore"):  # widening a signalling NaN is no error here
        actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    _assert_same_form(actual, expected, what)
    bound = np.broadcast_to(np.asarray(bound, np.float64), expected.shape)
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0.0, np.abs(actual - expected))
    error = np.where(np.isnan(error), np.inf, error)  # NaN against a number
    wrong = ~same & ((error > bound) | ~np.isfinite(error))
    if not wrong.any():
        return
    worst = int(np.argmax(np.where(wrong, error - np.where(np.isinf(error), 0, bound), -np.inf)))
    raise AssertionError(
        f"{what}: {np.count_nonzero(wrong)} of {wrong.size} differ by more than the bound"
        f"\n  first {_describe(actual, expected, int(np.argmax(wrong)))}"
        f"\n  worst {_describe(actual, expected, worst)}"
        f", error {error.flat[worst]:.9g}, bound {bound.flat[worst]:.9g}"
    )


def _assert_same_form(actual: NDArray, expected: NDArray, what: str) -> None:
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype} is not {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape} is not {expected.shape}"


def _bits(array: NDArray) -> NDArray[np.unsignedinteger]:
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}").reshape(array.shape)


def _describe(actual: NDArray, expected: NDArray, index: int) -> str:
    where = tuple(int(i) for i in np.unravel_index(index, actual.shape))
    return f"at {where}: got {actual[where]!r}, expected {expected[where]!r}"
