# SPDX-License-Identifier: MIT
"""Machine code to flat records for the core. Formats, opcodes and operand sizes come from
tinygrad's CDNA tables."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tinygrad.renderer.amd import detect_format
from tinygrad.renderer.amd.dsl import OPERANDS
from tinygrad.runtime.autogen.amd.cdna import enum as tables
from tinygrad.runtime.autogen.amd.cdna import ins as formats

# Order of the values in a record; from_record() in csrc/module.cpp reads the same order.
FIELDS = (
    "name pc size kind dst dst_n sdst sdst_n src0 src0_n src1 src1_n src2 src2_n data data_n "
    "addr addr_n saddr saddr_n soffset soffset_n literal neg abs clamp omod opsel opsel_hi dpp "
    "bound_ctrl row_mask bank_mask sdwa dst_sel dst_unused sel0 sel1 sext offset offset1 flags "
    "cbsz abid blgp scale0 scale1 simm"
).split()
RECORD = 64
_INDEX = {name: i for i, name in enumerate(FIELDS)}
_DEFAULTS = np.zeros(RECORD, np.int32)
for _name in (
    "dst",
    "sdst",
    "src0",
    "src1",
    "src2",
    "data",
    "addr",
    "saddr",
    "soffset",
    "dpp",
    "scale0",
    "scale1",
):
    _DEFAULTS[_INDEX[_name]] = -1
for _name, _value in (
    ("row_mask", 15),
    ("bank_mask", 15),
    ("dst_sel", 6),
    ("sel0", 6),
    ("sel1", 6),
):
    _DEFAULTS[_INDEX[_name]] = _value

BAD, SALU, SOPP, SMEM, VALU, VOP3P, MFMA, DS, GLOBAL, FLAT, SCRATCH, MUBUF = range(12)
KIND_NAMES = "bad salu sopp smem valu packed mfma lds global flat scratch buffer".split()
_SC0, _OFFEN, _IDXEN, _LDS, _GDS, _SVE, _LENIENT, _ALL_LANES, _OWN_CHECK, _LOW_SUM = (
    1 << i for i in range(10)
)
_SUMS_INTO_DST, _NOT_INDEXED = 1024, 2048

VCC, LITERAL, VGPR, AGPR, SCALAR_OFF = 106, 255, 256, 512, 127
_SCALE_LOAD = (0b110100111 << 7) | tables.VOP3POp.V_MFMA_LD_SCALE_B32.value

# Instructions that copy, select or move bits: an unwritten input makes an unwritten output and no
# fault.
_COPIES = frozenset(
    "v_mov_b32 v_mov_b64 v_accvgpr_read v_accvgpr_write v_accvgpr_mov_b32 v_cndmask_b32 "
    "v_perm_b32 v_bfi_b32 v_and_b32 v_or_b32 v_and_or_b32 v_lshl_or_b32 v_or3_b32 v_lshlrev_b32 "
    "v_lshrrev_b32 v_bfe_u32 v_alignbit_b32 v_pk_mov_b32 v_bitop3_b32 v_bitop3_b16 "
    "s_mov_b32 s_mov_b64 s_cselect_b32 s_cselect_b64 s_cmov_b32 s_cmov_b64 v_pack_b32_f16 "
    "s_pack_ll_b32_b16 s_pack_lh_b32_b16 s_pack_hh_b32_b16 s_and_b64 s_or_b64".split()
)
_LOW_SUMS = frozenset("v_mad_u64_u32 v_mad_i64_i32".split())
_OWN = frozenset("v_readfirstlane_b32 v_readlane_b32 v_writelane_b32".split())
_ACCUMULATING = ("v_fmac_", "v_dot2c_", "v_dot4c_", "v_dot8c_", "v_pk_fmac_")
_CARRY_IN = frozenset("v_addc_co_u32 v_subb_co_u32 v_subbrev_co_u32".split())
_CARRY_OUT = _CARRY_IN | frozenset("v_add_co_u32 v_sub_co_u32 v_subrev_co_u32".split())
_NO_OPERANDS = frozenset("buffer_wbl2 buffer_inv buffer_wbinvl1 buffer_wbinvl1_vol".split())


@dataclass
class Decoded:
    """Records in address order, and the mnemonics they index."""

    records: np.ndarray  # int32 [n, RECORD]
    names: list[str]

    def column(self, name: str) -> np.ndarray:
        return self.records[:, _INDEX[name]]


def decode(code: bytes) -> Decoded:
    """Decodes `code` linearly. What no format matches becomes a record that faults when
    executed."""
    names: dict[str, int] = {}
    rows = []
    at = 0
    while at + 4 <= len(code):
        name, size, fields = _cached(code[at : at + 16])
        row = _DEFAULTS.copy()
        for key, value in fields:
            row[key] = value
        row[0] = names.setdefault(name, len(names))
        row[1], row[2] = at, size
        rows.append(row)
        at += size
    records = np.array(rows, np.int32).reshape(-1, RECORD)
    return Decoded(records, list(names))


_cache: dict[bytes, tuple[str, int, list[tuple[int, int]]]] = {}


def _cached(data: bytes) -> tuple[str, int, list[tuple[int, int]]]:
    """Decodes the instruction at the start of data. The cache is keyed by its own bytes, 4 to 16 of
    them."""
    for n in (4, 8, 12, 16):
        hit = _cache.get(data[:n])
        if hit is not None and hit[1] == n:
            return hit
    result = _decode_one(data)
    _cache[data[: result[1]]] = result
    return result


def instruction(data: bytes):
    """The tinygrad instruction at the start of data, or None."""
    word = int.from_bytes(data[:4], "little")
    # NOTE: the 128-bit format is recognised by its first half; its second half alone looks like any
    # unscaled MFMA.
    if word >> 16 == _SCALE_LOAD:
        return formats.VOP3PX2.from_bytes(data) if len(data) >= 16 else None
    try:
        cls = detect_format(data[:8], "cdna")
        inst = cls.from_bytes(data)
    except (ValueError, AssertionError):
        return None
    return inst if inst._base_size <= len(data) else None


def _decode_one(data: bytes) -> tuple[str, int, list[tuple[int, int]]]:
    inst = instruction(data)
    if inst is None:
        return f"?0x{int.from_bytes(data[:4], 'little'):08x}", 4, []
    raw = inst._raw
    f = {n: (raw >> b.lo) & b.mask for n, b in inst._fields}
    name = inst.op.name.lower().removesuffix("_e32").removesuffix("_e64")
    widths = {k: max(1, bits // 32) for k, (_, bits, _) in OPERANDS.get(inst.op, {}).items()}
    out: dict[str, int] = {}
    base = type(inst).__name__.split("_")[0]
    _FORMS[base](type(inst).__name__, name, f, widths, out)
    if "literal" in f:
        out["literal"] = f["literal"] - (1 << 32) if f["literal"] >> 31 else f["literal"]
    flags = out.get("flags", 0)
    flags |= _LENIENT if name in _COPIES else 0
    flags |= _OWN_CHECK if name in _OWN else 0
    flags |= _LOW_SUM if name in _LOW_SUMS else 0
    flags |= _ALL_LANES if out["kind"] == MFMA else 0
    flags |= _SUMS_INTO_DST if name.startswith(_ACCUMULATING) else 0
    flags |= _NOT_INDEXED if out["kind"] == MFMA or "swap" in name else 0
    out["flags"] = flags
    return name, inst._base_size, [(_INDEX[k], v) for k, v in out.items()]


def _put(out: dict[str, int], key: str, code: int, dwords: int) -> None:
    out[key], out[f"{key}_n"] = code, dwords


def _signed(value: int, width: int) -> int:
    return value - (1 << width) if value >> (width - 1) else value


def _sop(cls: str, name: str, f: dict, w: dict, out: dict) -> None:
    out["kind"] = SALU
    if name == "s_set_gpr_idx_on":  # the second source field is an immediate
        _put(out, "src0", f["ssrc0"], 1)
        out["simm"] = f["ssrc1"]
        return
    if name.startswith("s_movrel"):  # M0 moves one operand: the handler finds its registers
        source = name.startswith("s_movrels")
        out["simm"] = f["ssrc0"] if source else f["sdst"]
        if source:
            _put(out, "dst", f["sdst"], w["sdst"])
        else:
            _put(out, "src0", f["ssrc0"], w["ssrc0"])
        return
    if "sdst" in f and ("sdst" in w or cls.startswith("SOPK")):
        n = w.get("sdst", 1)
        reads = cls.startswith("SOPK") and name.startswith(
            ("s_cmpk", "s_addk", "s_mulk", "s_setreg_b32")
        )
        reads |= name.startswith("s_bitset")
        if reads:
            _put(out, "src2", f["sdst"], n)
        _put(out, "dst", f["sdst"], 0 if name.startswith(("s_cmpk", "s_setreg")) else n)
    for i, key in enumerate(("ssrc0", "ssrc1")):
        if key in f and key in w:
            _put(out, f"src{i}", f[key], w[key])
    if "simm16" in f:
        out["simm"] = f["simm16"]


def _sopp(cls: str, name: str, f: dict, w: dict, out: dict) -> None:
    out["kind"], out["simm"] = SOPP, f["simm16"]
    if "vcc" in name:
        _put(out, "src0", VCC, 2)


def _smem(cls: str, name: str, f: dict, w: dict, out: dict) -> None:
    out["kind"] = SMEM
    atomic = "_atomic_" in name
    if "_store_" in name or atomic:
        _put(out, "data", f["sdata"], w["sdata"])
        out["flags"] = _SC0 * f["glc"]
    if "sdata" in w and (not atomic or f["glc"]) and "_store_" not in name:
        _put(out, "dst", f["sdata"], w["sdata"] // (2 if "cmpswap" in name else 1))
    if "sbase" in w:
        _put(out, "saddr", f["sbase"] * 2, 4 if "buffer" in name else 2)
    if f["imm"]:
        out["offset"] = _signed(f["offset"], 21)
        if f["soffset_en"]:
            _put(out, "soffset", f["soffset"], 1)
    elif "sbase" in w:
        # Without an immediate the offset register sits in soffset, or in the low bits of offset.
        _put(out, "soffset", f["soffset"] if f["soffset_en"] else f["offset"] & 127, 1)


def _source(out: dict, i: int, code: int, dwords: int) -> None:
    _put(out, f"src{i}", code, dwords)


def _vector(cls: str, name: str, f: dict, w: dict, out: dict) -> None:
    """VOP1, VOP2, VOPC, VOP3 and their DPP and SDWA forms."""
    out["kind"] = VALU
    base = cls.split("_")[0]
    compare = name.startswith(("v_cmp_", "v_cmpx_"))
    vdst = f.get("vdst", 0)
    if compare:
        dst = vdst if base == "VOP3" else (f["sdst"] if f.get("sd") else VCC)
        _put(out, "dst", dst, 2)
    elif name in ("v_readfirstlane_b32", "v_readlane_b32"):
        _put(out, "dst", vdst, 1)
    elif name not in ("v_nop", "v_clrexcp"):
        _put(out, "dst", VGPR + vdst, w.get("vdst", 1))
    if "SDWA" in cls:
        _source(out, 0, f["vsrc0"] + (0 if f["s0"] else VGPR), 1)
    elif "DPP" in cls:
        _source(out, 0, VGPR + f["vsrc0"], w.get("src0", 1))
    elif "src0" in w:
        _source(out, 0, f["src0"], w["src0"])
    if base in ("VOP2", "VOPC"):
        _source(out, 1, f["vsrc1"] + (0 if f.get("s1") else VGPR), w.get("vsrc1", 1))
    for i, key in ((1, "src1"), (2, "src2")):
        if base.startswith("VOP3") and key in w:
            _source(out, i, f[key], w[key])
    if name == "v_cndmask_b32" and base == "VOP2":
        _source(out, 2, VCC, 2)
    if name in _CARRY_OUT:
        _put(out, "sdst", f["sdst"] if base == "VOP3SD" else VCC, 2)
        if name in _CARRY_IN and base == "VOP2":
            _source(out, 2, VCC, 2)
    elif base == "VOP3SD":
        _put(out, "sdst", f["sdst"], 2)
    if name.startswith(_ACCUMULATING):
        _source(out, 2, out["dst"], out["dst_n"])
    if name.startswith("v_fmamk"):
        _source(out, 2, out["src1"], 1)
        _source(out, 1, LITERAL, 1)
    if name.startswith("v_fmaak"):
        _source(out, 2, LITERAL, 1)
    if "swap" in name:
        _source(out, 1, out["dst"], 1)
    if name == "v_accvgpr_mov_b32":
        out["dst"] += 256
        out["src0"] += 256
    if name.startswith("v_div_fmas"):
        _put(out, "soffset", VCC, 2)
    out["neg"] = f.get("neg", 0) | f.get("src0_neg", 0) | f.get("src1_neg", 0) << 1
    out["abs"] = f.get("abs", 0) | f.get("src0_abs", 0) | f.get("src1_abs", 0) << 1
    out["clamp"], out["omod"], out["opsel"] = f.get("clmp", 0), f.get("omod", 0), f.get("opsel", 0)
    if "DPP" in cls:
        out["dpp"], out["bound_ctrl"] = f["dpp"], f["bc"]
        out["row_mask"], out["bank_mask"] = f["row_mask"], f["bank_mask"]
    if "SDWA" in cls:
        out["sdwa"], out["sel0"], out["sel1"] = 1, f["src0_sel"], f["src1_sel"]
        out["dst_sel"], out["dst_unused"] = f.get("dst_sel", 6), f.get("dst_unused", 0)
        out["sext"] = f["src0_sext"] | f["src1_sext"] << 1


_FRAGMENT = {0: 8, 1: 8, 2: 6, 3: 6, 4: 4}  # registers of an f8f6f4 operand by format code


def _matrix(cls: str, name: str, f: dict, w: dict, out: dict) -> None:
    out["kind"] = MFMA
    if name.startswith("v_accvgpr"):
        out["kind"] = VALU
        reads = name == "v_accvgpr_read"
        _put(out, "dst", VGPR + f["vdst"] + (0 if reads else 256), 1)
        _source(out, 0, f["src0"] + (256 if reads and f["src0"] >= VGPR else 0), 1)
        return
    acc_cd = 256 * f["acc_cd"]
    f8f6f4, sparse = "f8f6f4" in name, name.startswith("v_smfmac")
    counts = {k: w.get(k, 1) for k in ("src0", "src1", "src2", "vdst")}
    if f8f6f4:
        counts["src0"], counts["src1"] = _FRAGMENT.get(f["cbsz"], 8), _FRAGMENT.get(f["blgp"], 8)
    _put(out, "dst", VGPR + f["vdst"] + acc_cd, counts["vdst"])
    for i in range(3):
        code = f[f"src{i}"]
        if code >= VGPR:
            # The index of a sparse instruction is never an AccVGPR.
            code += (0 if sparse else acc_cd) if i == 2 else 256 * (f["acc"] >> i & 1)
        _source(out, i, code, counts[f"src{i}"])
    if sparse:  # adds to its destination
        _put(out, "data", out["dst"], out["dst_n"])
    out["cbsz"], out["abid"], out["blgp"] = f["cbsz"], f["abid"], f["blgp"]
    if cls == "VOP3PX2":
        out["scale0"], out["scale1"] = f["scale_src0"], f["scale_src1"]
        out["opsel"], out["opsel_hi"] = f["opsel"], f["opsel_hi"]
        out["neg"], out["abs"] = f["neg"], f["neg_hi"]


def _packed(cls: str, name: str, f: dict, w: dict, out: dict) -> None:
    if cls != "VOP3P" or name.startswith("v_accvgpr"):
        return _matrix(cls, name, f, w, out)
    out["kind"] = VOP3P
    _put(out, "dst", VGPR + f["vdst"], w.get("vdst", 1))
    for i in range(3):
        if f"src{i}" in w:
            _source(out, i, f[f"src{i}"], w[f"src{i}"])
    out["neg"], out["abs"], out["clamp"] = f["neg"], f["neg_hi"], f["clmp"]
    out["opsel"], out["opsel_hi"] = f["opsel"], f["opsel_hi"] | f["opsel_hi2"] << 2
    return None


def _ds(cls: str, name: str, f: dict, w: dict, out: dict) -> None:
    out["kind"] = DS
    acc = 256 * f["acc"]
    if "vdst" in w and "_rtn" in name or "read" in name or "permute" in name or "swizzle" in name:
        _put(out, "dst", VGPR + f["vdst"] + acc, w.get("vdst", 1))
    if name != "ds_nop":
        _put(out, "addr", VGPR + f["addr"], 1)
    if "data0" in w and "swizzle" not in name:
        _put(out, "data", VGPR + f["data0"] + acc, w["data0"])
    if "data1" in w:
        _source(out, 0, VGPR + f["data1"] + acc, w["data1"])
    out["offset"], out["offset1"], out["flags"] = f["offset0"], f["offset1"], _GDS * f["gds"]


def _flat(cls: str, name: str, f: dict, w: dict, out: dict) -> None:
    out["kind"] = {"FLAT": FLAT, "GLOBAL": GLOBAL, "SCRATCH": SCRATCH}[cls]
    acc = 256 * f["acc"]
    atomic = "_atomic_" in name
    if "_load_" in name and "_lds_" not in name or atomic and f["sc0"]:
        _put(out, "dst", VGPR + f["vdst"] + acc, w.get("vdst", w.get("data", 1)))
    if "_store_" in name or atomic:
        _put(out, "data", VGPR + f["data"] + acc, w.get("data", 1))
    scalar = cls != "FLAT" and f["saddr"] != SCALAR_OFF
    if cls == "SCRATCH":
        if f["sve"]:
            _put(out, "addr", VGPR + f["addr"], 1)
        if scalar:
            _put(out, "saddr", f["saddr"], 1)
    else:
        _put(out, "addr", VGPR + f["addr"], 1 if scalar else 2)
        if scalar:
            _put(out, "saddr", f["saddr"], 2)
    out["offset"] = f["offset"] if cls == "FLAT" else _signed(f["offset"], 13)
    out["flags"] = _SC0 * f["sc0"]


def _mubuf(cls: str, name: str, f: dict, w: dict, out: dict) -> None:
    out["kind"] = MUBUF
    if name in _NO_OPERANDS:
        return
    acc = 256 * f["acc"]
    atomic = "_atomic_" in name
    if "_load_" in name and not f["lds"] or atomic and f["sc0"]:
        _put(
            out,
            "dst",
            VGPR + f["vdata"] + acc,
            w.get("vdata", 1) // (2 if "cmpswap" in name else 1),
        )
    if "_store_" in name or atomic:
        _put(out, "data", VGPR + f["vdata"] + acc, w.get("vdata", 1))
    if f["offen"] or f["idxen"]:
        _put(out, "addr", VGPR + f["vaddr"], f["offen"] + f["idxen"])
    _put(out, "saddr", f["srsrc"] * 4, 4)
    _put(out, "soffset", f["soffset"], 1)
    out["offset"] = f["offset"]
    out["flags"] = _SC0 * f["sc0"] | _OFFEN * f["offen"] | _IDXEN * f["idxen"] | _LDS * f["lds"]


def _other(cls: str, name: str, f: dict, w: dict, out: dict) -> None:
    out["kind"] = BAD


_FORMS = {
    "SOP1": _sop, "SOP2": _sop, "SOPC": _sop, "SOPK": _sop, "SOPP": _sopp, "SMEM": _smem,
    "VOP1": _vector, "VOP2": _vector, "VOPC": _vector, "VOP3": _vector, "VOP3SD": _vector,
    "VOP3P": _packed, "VOP3PX2": _packed, "DS": _ds, "FLAT": _flat, "GLOBAL": _flat,
    "SCRATCH": _flat, "MUBUF": _mubuf, "MTBUF": _other,
}  # fmt: skip
