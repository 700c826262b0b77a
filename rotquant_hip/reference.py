# SPDX-License-Identifier: MIT
"""The numpy oracle: what every op must compute, bit for bit, obvious rather than fast.

It is a second witness, so it shares nothing with the ops: scales come from exact exponents
(`frexp`) and not from bit tricks, codes from a search over the table of values, layouts from
reshape and transpose and not from offsets. Floating-point arrays are float32; bfloat16 is a uint16
bit pattern. Wrong arguments raise ValueError.
"""

from __future__ import annotations

from math import prod

import numpy as np
from numpy.typing import ArrayLike, NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]

GROUP = 32  # elements that share one scale
ROTATION_SIZES = (16, 32, 64, 128, 256)
SCALE_MODES = ("round_up", "floor", "even", "ceil", "mse")
GATE_MODES = ("separated", "interleave")

E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)  # codes 0..7; 8..15 are negative
E8M0_BIAS = 127
E8M0_NAN = 255

# Overflow to Inf, NaN and gradual underflow are results here, not accidents.
_quiet = np.errstate(all="ignore")


# --- number formats ---------------------------------------------------------------------------


def bf16_to_float32(bits: NDArray[np.uint16]) -> F32:
    """bfloat16 bit patterns as float32, exactly: they are its upper halves."""
    return np.left_shift(bits, 16, dtype=np.uint32).view(np.float32)


@_quiet
def float32_to_bf16(values: ArrayLike) -> NDArray[np.uint16]:
    """float32 to bfloat16 bit patterns: nearest, ties to even, overflow to Inf, NaN to 0x7FC0."""
    exact = np.asarray(values, np.float32).astype(np.float64)
    _, exponent = np.frexp(exact)
    # 8 significant bits, fewer below the smallest normal 2^-126 (frexp exponent -125).
    step = np.ldexp(1.0, np.maximum(exponent, -125) - 8)
    rounded = (np.rint(exact / step) * step).astype(np.float32)  # rint: ties to even
    bits = (rounded.view(np.uint32) >> 16).astype(np.uint16)
    return np.where(np.isnan(exact), np.uint16(0x7FC0), bits)


def e2m1_decode(codes: NDArray[np.uint8]) -> F32:
    """Codes 0..15 to their values; code 8 is -0."""
    return np.concatenate([E2M1_VALUES, -E2M1_VALUES])[np.asarray(codes)]


def e2m1_encode(values: ArrayLike) -> U8:
    """Codes of the nearest values: ties to the even code, saturation at 6, sign of zero kept."""
    values = np.asarray(values)
    if np.isnan(values).any():
        raise ValueError("values: e2m1 has no code for NaN")
    magnitude = np.minimum(np.abs(values).astype(np.float64), 6)
    # argmin takes the first of equal distances, so the even codes stand first.
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7], np.uint8)
    distance = np.abs(magnitude[..., None] - E2M1_VALUES[order].astype(np.float64))
    return order[np.argmin(distance, axis=-1)] | (np.signbit(values).astype(np.uint8) << 3)


@_quiet
def e8m0_decode(bytes_: NDArray[np.uint8]) -> F32:
    """Scale bytes to 2^(byte - 127), the subnormal 2^-127 for byte 0; byte 255 is NaN."""
    bytes_ = np.asarray(bytes_)
    return np.where(bytes_ == E8M0_NAN, np.float32(np.nan), _power_of_two(bytes_.astype(np.int32)))


def _power_of_two(biased_exponent: NDArray[np.int32]) -> F32:
    return np.ldexp(np.ones(biased_exponent.shape, np.float32), biased_exponent - E8M0_BIAS)


def pack_nibbles(codes: U8) -> U8:
    """[..., K] codes to [..., K/2] bytes; the even element is the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: U8) -> U8:
    """[..., K/2] bytes to [..., K] codes; inverse of `pack_nibbles`."""
    pairs = np.stack([packed & 15, packed >> 4], axis=-1)
    return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


# --- scales and codes -------------------------------------------------------------------------


@_quiet
def scale_byte(amax: ArrayLike, mode: str) -> U8:
    """Scale bytes for the largest magnitudes `amax` of groups, in any mode but "mse".

    Zero gives byte 0, NaN and Inf give 255, all else is clamped to 0..254:
    round_up the smallest power of two >= amax / 6, ceil the same for amax / 4, floor the power of
    two at or below amax / 4, even that of amax rounded, half up, to two significant bits.
    """
    amax = np.asarray(amax, np.float32)
    finite = np.isfinite(amax)
    # amax = mantissa * 2^exponent with mantissa in [1/2, 1); 6 = 3/4 * 2^3 and 4 = 1/2 * 2^3.
    mantissa, exponent = np.frexp(np.where(finite, amax, np.float32(1)).astype(np.float64))
    match mode:
        case "round_up":
            power = exponent - 3 + (mantissa > 0.75)
        case "ceil":
            power = exponent - 3 + (mantissa > 0.5)
        case "floor":
            power = exponent - 3
        case "even":
            # In quarters the mantissa is 2, 3 or, rounded up to the next binade, 4.
            power = exponent - 3 + (np.floor(mantissa * 4 + 0.5) == 4)
        case _:
            raise ValueError(
                f"mode: expected one of {SCALE_MODES[:-1]} for amax alone, got {mode!r}"
            )
    byte = np.where(amax == 0, 0, np.clip(power + E8M0_BIAS, 0, 254))
    return np.where(finite, byte, E8M0_NAN).astype(np.uint8)


@_quiet
def quant(x: ArrayLike, *, scale_mode: str = "round_up") -> tuple[U8, U8]:
    """[..., K] to codes [..., K/2] and scales [..., K/32]; K divisible by 32."""
    return _quant_shifted(np.asarray(x, np.float32), 0, scale_mode)


def _quant_shifted(u: F32, k: int, scale_mode: str) -> tuple[U8, U8]:
    """Quantise u / 2^k, dividing in the scale byte's exponent only, so that nothing is rounded."""
    if u.ndim == 0 or u.shape[-1] % GROUP:
        raise ValueError(f"x: expected last dimension divisible by {GROUP}, got shape {u.shape}")
    groups = u.reshape(*u.shape[:-1], u.shape[-1] // GROUP, GROUP)
    amax = np.max(np.abs(groups), axis=-1)  # NaN if any is
    finite = np.isfinite(amax)
    byte = scale_byte(amax, "round_up" if scale_mode == "mse" else scale_mode).astype(np.int32)
    byte = np.where(finite, np.maximum(byte - k, 0), E8M0_NAN)

    # Groups that are zero or not finite have all codes 0, whatever their elements' signs.
    coded = finite & (amax > 0)
    groups = np.where(coded[..., None], groups, np.float32(0))
    if scale_mode == "mse":
        byte = np.where(coded & _lower_scale_is_better(groups, byte, k), byte - 1, byte)
    codes = e2m1_encode(_in_units(groups, byte, k))
    return pack_nibbles(codes.reshape(u.shape)), byte.astype(np.uint8)


def _in_units(groups: F32, byte: NDArray[np.integer], k: int) -> F32:
    """groups / 2^(byte + k - 127), a float32 division by a power of two."""
    return groups / _power_of_two(byte + k)[..., None]


def _lower_scale_is_better(groups: F32, byte: NDArray[np.integer], k: int) -> NDArray[np.bool_]:
    """Whether byte - 1 has the strictly smaller squared error; both in units of byte's scale."""
    possible = (byte >= 1) & (byte != E8M0_NAN)
    t = _in_units(groups, byte, k)
    error = _tree_sum_of_squares(t - _nearest_e2m1(t))
    error_below = _tree_sum_of_squares(t - _nearest_e2m1(2 * t) / 2)
    return possible & (error_below < error)


def _nearest_e2m1(values: F32) -> F32:
    return e2m1_decode(e2m1_encode(values))


def _tree_sum_of_squares(values: F32) -> F32:
    """Squares along the last axis summed in float32 as a balanced tree, neighbours first."""
    total = values * values
    while total.shape[-1] > 1:
        total = total[..., 0::2] + total[..., 1::2]
    return total[..., 0]


@_quiet
def dequant(codes: U8, scales: U8) -> F32:
    """codes [..., K/2] and natural scales [..., K/32] to float32 [..., K]; scale 255 gives NaN."""
    values = e2m1_decode(unpack_nibbles(np.asarray(codes)))
    return values * np.repeat(e8m0_decode(scales), GROUP, axis=-1)


# --- rotation ---------------------------------------------------------------------------------


@_quiet
def hadamard(x: ArrayLike, rotation_size: int) -> F32:
    """Unnormalised Sylvester-Hadamard transform of every block of `rotation_size` channels.

    float32 butterflies (a, b) -> (a + b, a - b) at the distances 1, 2, 4 ... rotation_size / 2.
    They cannot overflow where |x| <= FLT_MAX / rotation_size; beyond, a sum may be Inf or NaN.
    """
    x = np.asarray(x, np.float32)
    u = x
    distance = 1
    while distance < rotation_size:
        pairs = u.reshape(*x.shape[:-1], x.shape[-1] // (2 * distance), 2, distance)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        u = np.stack([a + b, a - b], axis=-2)
        distance *= 2
    return u.reshape(x.shape)


@_quiet
def rotate(
    x: ArrayLike,
    rotation: ArrayLike | None = None,
    *,
    rotation_size: int | None = None,
    prescale: ArrayLike | None = None,
) -> F32:
    """Each block of `rotation_size` channels of x [..., K] as a row vector times its matrix.

    rotation: [RS, RS] for all blocks or [K/RS, RS, RS], or None for Hadamard / sqrt(RS), RS = 64
    unless given. prescale: [K], multiplied in first. The result is float32: round it to the
    output's type afterwards. Hadamard: the sums come before the factor, see `hadamard` for what
    that overflows. Products and sums are rounded each.
    """
    v, rs = _prepare(x, rotation, rotation_size, prescale)
    if rotation is not None:
        return _times_matrix(v, np.asarray(rotation).astype(np.float32), rs)
    return hadamard(v, rs) * np.float32(1 / np.sqrt(rs))


@_quiet
def rotate_quant(
    x: ArrayLike,
    rotation: ArrayLike | None = None,
    *,
    rotation_size: int | None = None,
    prescale: ArrayLike | None = None,
    scale_mode: str = "round_up",
    bf16_intermediate: bool = False,
) -> tuple[U8, U8]:
    """`rotate`, then `quant`: codes [..., K/2] and scales [..., K/32].

    With bf16_intermediate the rotated values are rounded to bfloat16 between the two. Without it,
    and without a matrix, a factor 1 / sqrt(RS) that is a power of two goes into the scale's
    exponent, which differs from multiplying by it only where the product would be subnormal.
    """
    v, rs = _prepare(x, rotation, rotation_size, prescale)
    if rotation is None and rs in (16, 64, 256) and not bf16_intermediate:
        k = {16: 2, 64: 3, 256: 4}[rs]  # sqrt(rs) = 2^k
        return _quant_shifted(hadamard(v, rs), k, scale_mode)
    y = rotate(x, rotation, rotation_size=rotation_size, prescale=prescale)
    if bf16_intermediate:
        y = bf16_to_float32(float32_to_bf16(y))
    return quant(y, scale_mode=scale_mode)


def _prepare(
    x: ArrayLike, rotation: ArrayLike | None, rotation_size: int | None, prescale: ArrayLike | None
) -> tuple[F32, int]:
    """The prescaled float32 input and the rotation size."""
    v = np.asarray(x, np.float32)
    rs = 64 if rotation_size is None else rotation_size
    if rotation is not None:
        rs = np.shape(rotation)[-1]
        if rotation_size not in (None, rs):
            raise ValueError(f"rotation_size: expected {rs} as in rotation, got {rotation_size}")
    if rs not in ROTATION_SIZES:
        raise ValueError(f"rotation_size: expected one of {ROTATION_SIZES}, got {rs}")
    if v.ndim == 0 or v.shape[-1] % rs:
        raise ValueError(f"x: expected last dimension divisible by {rs}, got shape {v.shape}")
    if prescale is not None:
        v = v * np.asarray(prescale).astype(np.float32)
    return v, rs


def _times_matrix(v: F32, matrix: F32, rs: int) -> F32:
    """y[j] = sum over i, ascending, of v[i] * matrix[i][j]; every product and sum in float32."""
    blocks = v.reshape(*v.shape[:-1], v.shape[-1] // rs, rs)
    y = np.zeros_like(blocks)
    for i in range(rs):
        y = y + blocks[..., i, None] * matrix[..., i, :]
    return y.reshape(v.shape)


# --- product ----------------------------------------------------------------------------------


@_quiet
def gemm_a4w4(a: U8, b: U8, a_scales: U8, b_scales: U8) -> tuple[F64, F64]:
    """a @ b.T of the values that codes and natural scales stand for, in float64.

    a [..., K/2], a_scales [..., K/32], b [N, K/2], b_scales [N, K/32]. Returns the product [..., N]
    and that of the magnitudes, to which a bound on a float32 sum's error is relative. The powers of
    two are exact in float64, and so is a group of 32 products; adding the groups rounds.
    """
    left, right = _float64_values(a, a_scales), _float64_values(b, b_scales)
    return left @ right.T, np.abs(left) @ np.abs(right).T


@_quiet
def gemm_a4w4_by_groups(a: U8, b: U8, a_scales: U8, b_scales: U8) -> F32:
    """The same in float32 [..., N], as a CPU computes it: bit for bit.

    Every group's exact sum is rounded to float32, then the groups are added in ascending order.
    """
    left, right = _float64_values(a, a_scales), _float64_values(b, b_scales)
    total = np.zeros((*a.shape[:-1], b.shape[0]), np.float32)
    for k in range(0, left.shape[-1], GROUP):
        total += (left[..., k : k + GROUP] @ right[:, k : k + GROUP].T).astype(np.float32)
    return total


def _float64_values(codes: U8, scales: U8) -> F64:
    """As `dequant`, but nothing overflows."""
    scale = np.ldexp(1.0, scales.astype(np.int32) - E8M0_BIAS)
    scale = np.where(scales == E8M0_NAN, np.nan, scale)
    return e2m1_decode(unpack_nibbles(codes)) * np.repeat(scale, GROUP, axis=-1)


# --- layouts ----------------------------------------------------------------------------------
# All of these move elements of any dtype, so that a test can shuffle positions instead of bytes.


def shuffle_scales(scales: NDArray, *, gate_mode: str = "separated") -> NDArray:
    """Scales in the order the GEMM reads them; padding cells are 0.

    separated: [M, G] or [E, N, G] (N divisible by 32, read as [E*N, G]) -> [ceil256(M), ceil8(G)].
    interleave: [2I, G] or [E, 2I, G], gate rows first, I divisible by 16 -> [..., 2I, ceil8(G)].
    """
    _check_gate_mode(gate_mode)
    if gate_mode == "separated":
        if scales.ndim == 3 and scales.shape[1] % 32:
            raise ValueError(f"scales: expected N divisible by 32, got shape {scales.shape}")
        padded = _pad(scales.reshape(prod(scales.shape[:-1]), scales.shape[-1]), 256, 8)
        rows, groups = padded.shape
        tiles = padded.reshape(rows // 32, 2, 16, groups // 8, 2, 4)  # row halves, group halves
        return tiles.transpose(0, 3, 5, 2, 4, 1).reshape(rows, groups)
    _check_gate_up(scales)
    padded = _pad(scales, 1, 8)
    *experts, rows, groups = padded.shape
    tiles = padded.reshape(prod(experts), 2, rows // 32, 16, groups // 8, 2, 4)  # gate and up
    return tiles.transpose(0, 2, 4, 6, 3, 5, 1).reshape(*experts, rows, groups)


def unshuffle_scales(
    scales: NDArray, *, rows: int, groups: int, gate_mode: str = "separated"
) -> NDArray:
    """Inverse of `shuffle_scales`: [..., rows, groups] without the padding."""
    _check_gate_mode(gate_mode)
    *experts, rows_in, groups_in = scales.shape
    if gate_mode == "separated":
        tiles = scales.reshape(rows_in // 32, groups_in // 8, 4, 16, 2, 2)
        natural = tiles.transpose(0, 5, 3, 1, 4, 2)
    else:
        tiles = scales.reshape(prod(experts), rows_in // 32, groups_in // 8, 4, 16, 2, 2)
        natural = tiles.transpose(0, 6, 1, 4, 2, 5, 3)
    return natural.reshape(*experts, rows_in, groups_in)[..., :rows, :groups]


def shuffle_weight(weight: NDArray, *, gate_mode: str = "separated") -> NDArray:
    """Packed weights [N, Kb] or [E, N, Kb] in blocks of 16 rows x 16 bytes; same shape.

    N and Kb divisible by 16. interleave: N = 2I, gate rows first, I divisible by 16; blocks of
    gate rows and of up rows then alternate.
    """
    _check_gate_mode(gate_mode)
    *experts, n, kb = weight.shape
    if n % 16 or kb % 16:
        raise ValueError(f"weight: expected N and Kb divisible by 16, got shape {weight.shape}")
    if gate_mode == "separated":
        blocks = weight.reshape(prod(experts), n // 16, 16, kb // 16, 16)
        return blocks.transpose(0, 1, 3, 2, 4).reshape(weight.shape)
    _check_gate_up(weight)
    blocks = weight.reshape(prod(experts), 2, n // 32, 16, kb // 16, 16)
    return blocks.transpose(0, 2, 1, 4, 3, 5).reshape(weight.shape)


def unshuffle_weight(weight: NDArray, *, gate_mode: str = "separated") -> NDArray:
    """Inverse of `shuffle_weight`."""
    _check_gate_mode(gate_mode)
    *experts, n, kb = weight.shape
    if gate_mode == "separated":
        blocks = weight.reshape(prod(experts), n // 16, kb // 16, 16, 16)
        return blocks.transpose(0, 1, 3, 2, 4).reshape(weight.shape)
    blocks = weight.reshape(prod(experts), n // 32, 2, kb // 16, 16, 16)
    return blocks.transpose(0, 2, 1, 4, 3, 5).reshape(weight.shape)


def _pad(array: NDArray, rows: int, columns: int) -> NDArray:
    """Zeros after the last two dimensions up to multiples of rows and columns."""
    widths = [(0, 0)] * (array.ndim - 2) + [(0, -array.shape[-2] % rows)]
    return np.pad(array, [*widths, (0, -array.shape[-1] % columns)])


def _check_gate_mode(gate_mode: str) -> None:
    if gate_mode not in GATE_MODES:
        raise ValueError(f"gate_mode: expected one of {GATE_MODES}, got {gate_mode!r}")


def _check_gate_up(array: NDArray) -> None:
    if array.shape[-2] % 32:
        raise ValueError(f"expected 2I rows with I divisible by 16, got shape {array.shape}")
