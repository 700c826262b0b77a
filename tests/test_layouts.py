# SPDX-License-Identifier: MIT
"""The closed-form index maps against the reshape-and-transpose forms, and against their inverses.

The reference shuffles any dtype: an array of positions comes out as the map itself.
"""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from compare import assert_bytes_equal
from hypothesis import given, settings
from hypothesis import strategies as st

from rotquant_hip import layouts
from rotquant_hip import reference as ref


def positions(*shape: int) -> np.ndarray:
    """1, 2, 3 ... in row-major order, so that 0 can only be padding."""
    return np.arange(1, prod(shape) + 1, dtype=np.int64).reshape(shape)


def scatter(values: np.ndarray, offsets: np.ndarray, size: int) -> np.ndarray:
    """A zeroed buffer with each value at its offset; no two share one."""
    assert len(np.unique(offsets)) == offsets.size
    assert offsets.min(initial=0) >= 0 and offsets.max(initial=0) < max(size, 1)
    buffer = np.zeros(size, values.dtype)
    buffer[offsets] = values
    return buffer


def grid(rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    row, column = np.indices((rows, columns))
    return row, column


# --- written out ------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [9, 16])
@pytest.mark.parametrize(
    "row, group, offset",
    [
        (0, 0, 0),
        (16, 0, 1),  # the other row half is the next byte
        (0, 4, 2),  # the other group half is the one after
        (16, 4, 3),
        (1, 0, 4),  # the next row is the next lane
        (15, 0, 60),
        (0, 1, 64),  # the next group is 16 lanes on
        (31, 7, 255),
        (0, 8, 256),  # the next tile along the row
        (32, 0, 512),  # the next row of tiles
        (37, 14, 512 + 256 + 2 * 64 + 5 * 4 + 2),
    ],
)
def test_scale_offset_written_out(row, group, offset, groups):
    assert layouts.scale_offset(row, group, groups) == offset
    assert layouts.scale_coord(offset, groups) == (row, group)


@pytest.mark.parametrize(
    "row, byte, offset",
    [(0, 0, 0), (0, 15, 15), (1, 0, 16), (15, 15, 255), (0, 16, 256), (16, 0, 768), (18, 35, 1315)],
)
def test_weight_offset_written_out(row, byte, offset):
    assert layouts.weight_offset(row, byte, 48) == offset
    assert layouts.weight_coord(offset, 48) == (row, byte)


@pytest.mark.parametrize(
    "row, offset", [(0, 0), (15, 60), (16, 256), (32, 1), (47, 61), (48, 257), (50, 265)]
)
def test_interleaved_scale_offset_written_out(row, offset):
    # I = 32, so row 32 is the first up row: the byte after the first gate row's.
    assert layouts.interleaved_scale_offset(row, 0, 8, 32) == offset
    assert layouts.interleaved_scale_coord(offset, 8, 32) == (row, 0)


@pytest.mark.parametrize("row, offset", [(0, 0), (15, 240), (16, 1024), (32, 512), (48, 1536)])
def test_interleaved_weight_offset_written_out(row, offset):
    assert layouts.interleaved_weight_offset(row, 0, 32, 32) == offset
    assert layouts.interleaved_weight_coord(offset, 32, 32) == (row, 0)


def test_a_lane_holds_what_its_mfma_operand_needs():
    """Lane, byte of its dword -> row, group; the two bits of the byte are row half, group half."""
    for offset in range(256):
        lane, byte = divmod(offset, 4)
        row, group = layouts.scale_coord(offset, 8)
        assert (row % 16, group % 4) == (lane % 16, lane // 16)
        assert (row // 16, group // 4) == (byte % 2, byte // 2)


@pytest.mark.parametrize("count, rows, groups", [(0, 0, 0), (1, 256, 8), (8, 256, 8), (9, 256, 16)])
def test_padding(count, rows, groups):
    assert layouts.padded_rows(count) == rows
    assert layouts.padded_groups(count) == groups
    counts = np.array([255, 256, 257])
    assert layouts.padded_rows(counts).tolist() == [256, 256, 512]
    assert layouts.padded_groups(counts).tolist() == [256, 256, 264]


# --- against reshape and transpose --------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 3, 8, 12, 17])
@pytest.mark.parametrize("rows", [0, 1, 16, 33, 256, 300])
def test_shuffle_scales(rows, groups):
    scales = positions(rows, groups)
    shuffled = ref.shuffle_scales(scales)
    assert shuffled.shape == (layouts.padded_rows(rows), layouts.padded_groups(groups))
    expected = scatter(scales, layouts.scale_offset(*grid(rows, groups), groups), shuffled.size)
    assert_bytes_equal(shuffled.ravel(), expected, "offsets, and 0 in the padding")
    restored = ref.unshuffle_scales(shuffled, rows=rows, groups=groups)
    assert_bytes_equal(restored, scales, "inverse")


@pytest.mark.parametrize("experts", [1, 3])
def test_shuffle_scales_of_experts_is_one_tall_tensor(experts):
    scales = positions(experts, 96, 5)
    assert_bytes_equal(ref.shuffle_scales(scales), ref.shuffle_scales(scales.reshape(-1, 5)), "2-D")
    with pytest.raises(ValueError, match="N divisible by 32"):
        ref.shuffle_scales(positions(experts, 48, 5))


@pytest.mark.parametrize("leading", [(), (0,), (1,), (3,)])
@pytest.mark.parametrize("inter, groups", [(16, 1), (16, 8), (48, 12), (64, 3)])
def test_shuffle_scales_interleave(leading, inter, groups):
    scales = positions(*leading, 2 * inter, groups)
    shuffled = ref.shuffle_scales(scales, gate_mode="interleave")
    assert shuffled.shape == (*leading, 2 * inter, layouts.padded_groups(groups))
    offsets = layouts.interleaved_scale_offset(*grid(2 * inter, groups), groups, inter)
    for expert in np.ndindex(leading):
        expected = scatter(scales[expert], offsets, shuffled[expert].size)
        assert_bytes_equal(shuffled[expert].ravel(), expected, f"expert {expert}")
    restored = ref.unshuffle_scales(shuffled, rows=2 * inter, groups=groups, gate_mode="interleave")
    assert_bytes_equal(restored, scales, "inverse")


@pytest.mark.parametrize("leading", [(), (0,), (1,), (3,)])
@pytest.mark.parametrize("rows, row_bytes", [(16, 16), (48, 32), (32, 80)])
def test_shuffle_weight(leading, rows, row_bytes):
    weight = positions(*leading, rows, row_bytes)
    shuffled = ref.shuffle_weight(weight)
    offsets = layouts.weight_offset(*grid(rows, row_bytes), row_bytes)
    for expert in np.ndindex(leading):
        expected = scatter(weight[expert], offsets, rows * row_bytes)
        assert_bytes_equal(shuffled[expert].ravel(), expected, f"expert {expert}")
    assert_bytes_equal(ref.unshuffle_weight(shuffled), weight, "inverse")


@pytest.mark.parametrize("leading", [(), (0,), (1,), (3,)])
@pytest.mark.parametrize("inter, row_bytes", [(16, 16), (48, 32), (64, 80)])
def test_shuffle_weight_interleave(leading, inter, row_bytes):
    weight = positions(*leading, 2 * inter, row_bytes)
    shuffled = ref.shuffle_weight(weight, gate_mode="interleave")
    offsets = layouts.interleaved_weight_offset(*grid(2 * inter, row_bytes), row_bytes, inter)
    for expert in np.ndindex(leading):
        expected = scatter(weight[expert], offsets, 2 * inter * row_bytes)
        assert_bytes_equal(shuffled[expert].ravel(), expected, f"expert {expert}")
    restored = ref.unshuffle_weight(shuffled, gate_mode="interleave")
    assert_bytes_equal(restored, weight, "inverse")


def test_shuffles_move_bytes_and_reject_odd_shapes():
    rng = np.random.default_rng(0)
    weight = rng.integers(0, 256, (2, 32, 48)).astype(np.uint8)
    for mode in ref.GATE_MODES:
        shuffled = ref.shuffle_weight(weight, gate_mode=mode)
        assert shuffled.dtype == np.uint8
        assert sorted(shuffled.ravel()) == sorted(weight.ravel())
    assert ref.shuffle_scales(weight[0]).dtype == np.uint8
    for shape in [(24, 16), (16, 24)]:
        with pytest.raises(ValueError, match="N and Kb divisible by 16"):
            ref.shuffle_weight(positions(*shape))
    for shuffle in (ref.shuffle_weight, ref.shuffle_scales):
        with pytest.raises(ValueError, match="I divisible by 16"):
            shuffle(positions(48, 16), gate_mode="interleave")
        with pytest.raises(ValueError, match="got 'both'"):
            shuffle(positions(32, 16), gate_mode="both")


# --- inverses, also where no array would fit ----------------------------------------------------

big = st.integers(0, 2**24)
group_counts = st.integers(1, 2**12)
tiles_of_16 = st.integers(1, 2**12).map(lambda n: 16 * n)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), row=big, groups=group_counts)
def test_scale_maps_are_inverse(data, row, groups):
    group = data.draw(st.integers(0, groups - 1))
    offset = layouts.scale_offset(row, group, groups)
    assert layouts.scale_coord(offset, groups) == (row, group)
    assert layouts.scale_offset(row, group, layouts.padded_groups(groups)) == offset
    assert layouts.scale_offset(*layouts.scale_coord(offset + 1, groups), groups) == offset + 1
    # The tile, and then what the transpose of one tile says.
    row_tiles, tile = divmod(offset, 32 * layouts.padded_groups(groups))
    assert (row_tiles, tile // 256) == (row // 32, group // 8)
    one_tile = ref.shuffle_scales(positions(32, 8)).ravel()
    assert one_tile[offset % 256] == row % 32 * 8 + group % 8 + 1


@settings(max_examples=300, deadline=None)
@given(data=st.data(), row=big, row_bytes=tiles_of_16)
def test_weight_maps_are_inverse(data, row, row_bytes):
    byte = data.draw(st.integers(0, row_bytes - 1))
    offset = layouts.weight_offset(row, byte, row_bytes)
    assert layouts.weight_coord(offset, row_bytes) == (row, byte)
    row_of_blocks, block = divmod(offset, 16 * row_bytes)
    assert (row_of_blocks, block // 256) == (row // 16, byte // 16)
    assert offset % 256 == row % 16 * 16 + byte % 16


@settings(max_examples=300, deadline=None)
@given(data=st.data(), inter=tiles_of_16, groups=group_counts, row_bytes=tiles_of_16)
def test_interleaved_maps_are_inverse(data, inter, groups, row_bytes):
    row = data.draw(st.integers(0, 2 * inter - 1))
    group = data.draw(st.integers(0, groups - 1))
    byte = data.draw(st.integers(0, row_bytes - 1))
    up, q = divmod(row, inter)

    scale = layouts.interleaved_scale_offset(row, group, groups, inter)
    assert layouts.interleaved_scale_coord(scale, groups, inter) == (row, group)
    # The gate row q and the up row q share a dword.
    assert scale ^ up == layouts.interleaved_scale_offset(q, group, groups, inter)

    weight = layouts.interleaved_weight_offset(row, byte, row_bytes, inter)
    assert layouts.interleaved_weight_coord(weight, row_bytes, inter) == (row, byte)
    # The up rows' blocks follow the matching gate rows'.
    gate = layouts.interleaved_weight_offset(q, byte, row_bytes, inter)
    assert weight == gate + up * 16 * row_bytes


@pytest.mark.parametrize("groups", [1, 8, 13])
def test_every_offset_has_one_coordinate(groups):
    """Padding included: the maps are permutations of the whole buffer."""
    rows, padded = 256, layouts.padded_groups(groups)
    offsets = np.arange(rows * padded)
    row, group = layouts.scale_coord(offsets, groups)
    assert_bytes_equal(np.sort(row * padded + group), offsets, "onto")
    assert_bytes_equal(layouts.scale_offset(row, group, groups), offsets, "inverse")
    row, group = layouts.interleaved_scale_coord(offsets, groups, 128)
    assert_bytes_equal(np.sort(row * padded + group), offsets, "onto, interleaved")
    assert_bytes_equal(
        layouts.interleaved_scale_offset(row, group, groups, 128), offsets, "inverse, interleaved"
    )


def test_offsets_beyond_32_bits():
    groups, row_bytes = 7168 // 32, 7168 // 2
    rows = 385 * 6144  # a large expert weight's
    row = np.array([0, rows // 2, rows - 1])
    offsets = layouts.weight_offset(row, row_bytes - 1, row_bytes)
    assert offsets.dtype == np.int64 and offsets[-1] > 2**32
    assert offsets.tolist() == [
        layouts.weight_offset(int(r), row_bytes - 1, row_bytes) for r in row
    ]
    assert offsets[-1] == rows * row_bytes - 1
    assert layouts.weight_coord(int(offsets[-1]), row_bytes) == (rows - 1, row_bytes - 1)
    last = layouts.scale_offset(2**24 - 1, groups - 1, groups)
    assert last == 2**24 * groups - 1 > 2**31
