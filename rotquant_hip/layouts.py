# SPDX-License-Identifier: MIT
"""Where a scale or a weight byte lives: the index maps of csrc/core/layout.h, and their inverses.

Every map is exact integer arithmetic and takes Python ints or integer arrays alike.
NOTE: arrays must be int64. Offsets pass 2^31 in real models, and numpy wraps narrower types.

Scales are stored in tiles of 32 rows x 8 groups (256 channels), 256 bytes each, tile after tile
along a row of tiles. A tile is 64 dwords, one for each lane of a wave, and a lane's four bytes are
the four scales it needs for two MFMA steps of 16 rows and 128 channels:

             groups 0..3        groups 4..7
           +-----------------+-----------------+
    rows   | byte 0          | byte 2          |      dword (= lane) of row r, group g:
    0..15  | of lanes 0..63  | of lanes 0..63  |          (g % 4) * 16 + r % 16
           +-----------------+-----------------+
    rows   | byte 1          | byte 3          |      so that lanes 0..15 hold groups 0 and 4,
    16..31 | of lanes 0..63  | of lanes 0..63  |      lanes 16..31 groups 1 and 5, and so on
           +-----------------+-----------------+

Weights are stored in blocks of 16 rows x 16 bytes (32 channels), row after row inside a block, so
that one lane's MFMA operand is 16 bytes in a run.

The interleaved forms are for the gate and up projection in one tensor of 2I rows, gate rows first:
sixteen gate rows and the matching sixteen up rows take turns. They are the plain maps of a
permuted row.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Index = TypeVar("Index", int, NDArray[np.int64])

SCALE_ROW_PADDING = 256  # rows of a separated scale tensor
SCALE_GROUP_PADDING = 8


def padded_rows(rows: Index) -> Index:
    """Rows of a shuffled scale tensor: `rows` up to a multiple of 256."""
    return -(-rows // SCALE_ROW_PADDING) * SCALE_ROW_PADDING


def padded_groups(groups: Index) -> Index:
    """Groups of 32 in a row of a shuffled scale tensor: `groups` up to a multiple of 8."""
    return -(-groups // SCALE_GROUP_PADDING) * SCALE_GROUP_PADDING


def scale_offset(row: Index, group: Index, groups: int) -> Index:
    """Byte offset of the scale of (row, group) in a tensor of `groups` groups a row, padded or not.

    (row/32)*32*G8 + (group/8)*256 + (group%4)*64 + (row%16)*4 + ((group%8)/4)*2 + (row%32)/16
    """
    return (
        row // 32 * (32 * padded_groups(groups))
        + group // 8 * 256
        + group % 4 * 64
        + row % 16 * 4
        + group % 8 // 4 * 2
        + row % 32 // 16
    )


def scale_coord(offset: Index, groups: int) -> tuple[Index, Index]:
    """(row, group) of the scale at a byte offset; inverse of `scale_offset`.

    A group at or past `groups` is padding, as is a row past the tensor's.
    """
    row_of_tiles = 32 * padded_groups(groups)
    tile = offset % row_of_tiles // 256
    row = offset // row_of_tiles * 32 + offset % 2 * 16 + offset // 4 % 16
    group = tile * 8 + offset // 2 % 2 * 4 + offset // 64 % 4
    return row, group


def weight_offset(row: Index, byte: Index, row_bytes: int) -> Index:
    """Byte offset of (row, byte) in one expert's shuffled weight of `row_bytes` = K/2 a row.

    (row/16)*16*Kb + (byte/16)*256 + (row%16)*16 + byte%16
    """
    return row // 16 * (16 * row_bytes) + byte // 16 * 256 + row % 16 * 16 + byte % 16


def weight_coord(offset: Index, row_bytes: int) -> tuple[Index, Index]:
    """(row, byte) at a byte offset of one expert's shuffled weight; inverse of `weight_offset`."""
    row_of_blocks = 16 * row_bytes
    row = offset // row_of_blocks * 16 + offset // 16 % 16
    byte = offset % row_of_blocks // 256 * 16 + offset % 16
    return row, byte


def interleaved_row(row: Index, inter: int) -> Index:
    """Where row 0..2I-1 goes when blocks of 16 gate rows and 16 up rows take turns; I = `inter`.

    (q/16)*32 + s*16 + q%16 with s = row/I (0 gate, 1 up) and q = row%I
    """
    gate_or_up, q = row // inter, row % inter
    return q // 16 * 32 + gate_or_up * 16 + q % 16


def separated_row(row: Index, inter: int) -> Index:
    """Inverse of `interleaved_row`."""
    return row % 32 // 16 * inter + row // 32 * 16 + row % 16


def interleaved_scale_offset(row: Index, group: Index, groups: int, inter: int) -> Index:
    """Byte offset of the scale of (row, group) within one expert, gate and up interleaved.

    (q/16)*32*G8 + (group/8)*256 + (group%4)*64 + (q%16)*4 + ((group%8)/4)*2 + s
    """
    return scale_offset(interleaved_row(row, inter), group, groups)


def interleaved_scale_coord(offset: Index, groups: int, inter: int) -> tuple[Index, Index]:
    """(row, group) at a byte offset within one expert; inverse of `interleaved_scale_offset`."""
    row, group = scale_coord(offset, groups)
    return separated_row(row, inter), group


def interleaved_weight_offset(row: Index, byte: Index, row_bytes: int, inter: int) -> Index:
    """Byte offset of (row, byte) within one expert, gate and up interleaved.

    ((q/16)*2 + s)*16*Kb + (byte/16)*256 + (q%16)*16 + byte%16
    """
    return weight_offset(interleaved_row(row, inter), byte, row_bytes)


def interleaved_weight_coord(offset: Index, row_bytes: int, inter: int) -> tuple[Index, Index]:
    """(row, byte) at a byte offset within one expert; inverse of `interleaved_weight_offset`."""
    row, byte = weight_coord(offset, row_bytes)
    return separated_row(row, inter), byte
