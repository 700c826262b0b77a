# SPDX-License-Identifier: MIT
"""AMDGPU code objects: ELF image, kernel descriptors, metadata; clang offload bundles around
them."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path

import msgpack

_EM_AMDGPU = 224
_MACH_GFX950 = 0x4F
_IMAGE_MAX = 1 << 32
_BUNDLE = b"__CLANG_OFFLOAD_BUNDLE__"
_SHT_SYMTAB, _SHT_RELA, _SHT_DYNSYM = 2, 4, 11
_PT_LOAD, _PT_NOTE = 1, 4


@dataclass(frozen=True)
class Argument:
    """One kernel argument as the metadata gives it. `offset` and `size` are bytes of the kernarg
    segment."""

    name: str
    offset: int
    size: int
    kind: str  # global_buffer, by_value, hidden_...

    @property
    def hidden(self) -> bool:
        return self.kind.startswith("hidden_")


@dataclass(frozen=True)
class KernelInfo:
    """What the descriptor and the metadata say about one kernel. Sizes are bytes, registers are
    counts."""

    name: str
    args: tuple[Argument, ...]
    lds_bytes: int
    vgprs: int
    agprs: int
    sgprs: int
    scratch_bytes: int
    max_workgroup: int
    kernarg_bytes: int
    entry: int  # address inside the image
    user_sgprs: int
    workgroup_ids: tuple[bool, bool, bool]
    mode: int  # initial MODE register
    properties: int
    preload: tuple[int, int]  # kernarg preload: dwords, dword offset
    arch_vgprs: int  # allocated, accum_offset
    acc_vgprs: int  # allocated behind it
    has_metadata: bool


@dataclass
class CodeObject:
    """The loaded image. `code` is the address range of the instructions inside it."""

    image: bytearray
    writable: tuple[int, int]
    code: tuple[int, int]
    version: int
    kernels: dict[str, KernelInfo]
    sections: dict[str, bytes] = field(default_factory=dict)


def read(source: str | Path | bytes) -> bytes:
    """The gfx950 ELF inside a path or bytes: raw, in an offload bundle, or in a host program's
    .hip_fatbin. Raises ValueError when there is none."""
    data = (
        bytes(source)
        if isinstance(source, (bytes, bytearray, memoryview))
        else Path(source).read_bytes()
    )
    data = _unbundled(data)
    if _machine(data) != _EM_AMDGPU:
        fatbin = _sections(data).get(".hip_fatbin")
        if fatbin is None:
            raise ValueError("code object: expected an AMDGPU ELF, got another machine's")
        data = _unbundled(_section_bytes(data, fatbin))
    if _machine(data) != _EM_AMDGPU:
        raise ValueError("code object: expected an AMDGPU ELF, got another machine's")
    return data


def _unbundled(data: bytes) -> bytes:
    if data[:4] == b"CCOB":
        raise ValueError(
            "code object: compressed offload bundles are not supported; use --no-offload-compress"
        )
    if data.startswith(_BUNDLE):
        data = _from_bundle(data)
    if data[:4] != b"\x7fELF":
        got = f"{len(data)} bytes that begin with {data[:4]!r}" if data else "nothing (0 bytes)"
        raise ValueError(f"code object: expected an ELF or a clang offload bundle, got {got}")
    return data


def _machine(data: bytes) -> int:
    if _slice(data, 4, 2, "ELF header") != b"\2\1":
        raise ValueError("code object: expected a 64-bit little-endian ELF")
    return _unpack("<H", data, 18, "ELF header")[0]


def _from_bundle(data: bytes) -> bytes:
    at = len(_BUNDLE)
    (count,) = _unpack("<Q", data, at, "offload bundle")
    at += 8
    seen = []
    for _ in range(count):
        offset, size, length = _unpack("<QQQ", data, at, "offload bundle")
        triple = _slice(data, at + 24, length, "offload bundle").decode(errors="replace")
        at += 24 + length
        seen.append(triple)
        if "gfx950" in triple and size:
            return _slice(data, offset, size, f"offload bundle: {triple}")
    raise ValueError(f"offload bundle: no gfx950 entry among {seen}")


def _slice(data: bytes, at: int, size: int, what: str) -> bytes:
    if at < 0 or at + size > len(data):
        raise ValueError(
            f"code object: {what} ends at byte {at + size}, but there are {len(data)} bytes; "
            "the file is truncated or corrupt"
        )
    return data[at : at + size]


def _unpack(form: str, data: bytes, at: int, what: str) -> tuple:
    return struct.unpack(form, _slice(data, at, struct.calcsize(form), what))


def _text(data: bytes, at: int, what: str) -> str:
    end = data.find(b"\0", at)
    if end < 0:
        raise ValueError(f"code object: {what} has no end; the file is truncated or corrupt")
    return data[at:end].decode(errors="replace")


@dataclass(frozen=True)
class _Section:
    name: str
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    entry: int


def _sections(data: bytes) -> dict[str, _Section]:
    (offset,) = _unpack("<Q", data, 40, "ELF header")
    size, count, strings = _unpack("<HHH", data, 58, "ELF header")
    raw = [_unpack("<IIQQQQIIQQ", data, offset + i * size, "section table") for i in range(count)]
    if not raw:
        return {}
    if strings >= count:
        raise ValueError(f"code object: names are in section {strings} of {count}")
    base = raw[strings][4]
    out = {}
    for name, kind, flags, address, at, length, link, _, _, entry in raw:
        text = _text(data, base + name, "a section name")
        out[text or f"#{len(out)}"] = _Section(text, kind, flags, address, at, length, link, entry)
    return out


def _section_bytes(data: bytes, s: _Section) -> bytes:
    return b"" if s.type == 8 else _slice(data, s.offset, s.size, f"section {s.name}")


def load(source: str | Path | bytes) -> CodeObject:
    """Parses a code object. Raises ValueError naming what does not fit gfx950, is damaged or is not
    supported."""
    data = read(source)
    (flags,) = _unpack("<I", data, 48, "ELF header")
    if flags & 0xFF != _MACH_GFX950:
        raise ValueError(f"code object: expected gfx950 (mach 0x4f), got mach 0x{flags & 0xFF:02x}")
    version = {3: 5, 4: 6}.get(data[8])
    if data[7] != 64 or version is None:
        raise ValueError(
            f"code object: expected version 5 or 6, got OS ABI {data[7]}, ABI version {data[8]}"
        )
    sections = _sections(data)
    segments = _segments(data)
    image, writable, executable = _image(data, segments)
    _refuse_relocations(data, sections)
    described = _metadata(data, segments)
    kernels = {}
    for name, (value, _, shndx) in _symbols(data, sections).items():
        if name.endswith(".kd") and shndx != 0:
            info = _kernel(name[:-3], value, image, executable, described.get(name))
            kernels[info.name] = info
    if not kernels:
        raise ValueError("code object: no kernel descriptor (symbol *.kd)")
    debug = {n: _section_bytes(data, s) for n, s in sections.items() if n.startswith(".debug_")}
    return CodeObject(image, writable, executable, version, kernels, debug)


@dataclass(frozen=True)
class _Segment:
    type: int
    flags: int
    offset: int
    address: int
    filesz: int
    memsz: int


def _segments(data: bytes) -> list[_Segment]:
    (offset,) = _unpack("<Q", data, 32, "ELF header")
    size, count = _unpack("<HH", data, 54, "ELF header")
    out = []
    for i in range(count):
        kind, flags, at, address, _, filesz, memsz, _ = _unpack(
            "<IIQQQQQQ", data, offset + i * size, "program header table"
        )
        out.append(_Segment(kind, flags, at, address, filesz, memsz))
    return out


def _image(
    data: bytes, segments: list[_Segment]
) -> tuple[bytearray, tuple[int, int], tuple[int, int]]:
    loads = [s for s in segments if s.type == _PT_LOAD]
    if not loads:
        raise ValueError(
            "code object: no loadable segment (relocatable object? link it with ld.lld -shared)"
        )
    size = max(s.address + s.memsz for s in loads)
    if size > _IMAGE_MAX or any(s.filesz > s.memsz for s in loads):
        raise ValueError(
            f"code object: segments end at address {size}, at most {_IMAGE_MAX}, "
            "or hold more bytes than they occupy; the file is corrupt"
        )
    contents = [_slice(data, s.offset, s.filesz, "a loadable segment") for s in loads]
    image = bytearray(size)
    writable, executable = (0, 0), (0, 0)
    for s, content in zip(loads, contents, strict=True):
        image[s.address : s.address + s.filesz] = content
        if s.flags & 2 and not s.flags & 1:
            writable = (writable[0] or s.address, s.address + s.memsz)
        if s.flags & 1:
            if executable != (0, 0):
                raise ValueError("code object: more than one executable segment")
            executable = (s.address, s.address + s.filesz)
    return image, writable, executable


def _symbols(data: bytes, sections: dict[str, _Section]) -> dict[str, tuple[int, int, int]]:
    """name -> (value, size, section index)"""
    by_index = list(sections.values())
    out = {}
    for s in by_index:
        if s.type not in (_SHT_SYMTAB, _SHT_DYNSYM):
            continue
        if s.link >= len(by_index):
            raise ValueError(f"code object: names of section {s.name} are in no section")
        strings = by_index[s.link].offset
        table = _section_bytes(data, s)
        for name, _, _, shndx, value, size in struct.iter_unpack(
            "<IBBHQQ", table[: len(table) // 24 * 24]
        ):
            text = _text(data, strings + name, "a symbol's name")
            if text:
                out[text] = (value, size, shndx)
    return out


def _refuse_relocations(data: bytes, sections: dict[str, _Section]) -> None:
    for s in sections.values():
        if s.type == _SHT_RELA and s.size:
            table = _section_bytes(data, s)
            entries = struct.iter_unpack("<QQq", table[: len(table) // 24 * 24])
            kinds = {info & 0xFFFFFFFF for _, info, _ in entries}
            raise ValueError(f"code object: dynamic relocations {sorted(kinds)} are not supported")


def _metadata(data: bytes, segments: list[_Segment]) -> dict[str, dict]:
    """What the AMDGPU note says of each kernel, by the symbol of its descriptor."""
    for s in segments:
        if s.type != _PT_NOTE:
            continue
        notes, at = _slice(data, s.offset, s.filesz, "a note segment"), 0
        while at + 12 <= len(notes):
            namesz, descsz, note = _unpack("<III", notes, at, "a note")
            desc = at + 12 + (namesz + 3) // 4 * 4
            if note == 32 and notes[at + 12 : at + 12 + namesz].rstrip(b"\0") == b"AMDGPU":
                return _described(_slice(notes, desc, descsz, "the metadata"))
            at = desc + (descsz + 3) // 4 * 4
    return {}


_NUMBERS = (
    ".vgpr_count .agpr_count .sgpr_count .max_flat_workgroup_size .kernarg_segment_size".split()
)


def _described(packed: bytes) -> dict[str, dict]:
    try:
        kernels = msgpack.unpackb(packed).get("amdhsa.kernels", [])
        by_symbol = {k[".symbol"]: k for k in kernels}
        fits = all(
            isinstance(symbol, str)
            and all(_is_size(k.get(n, 0)) for n in _NUMBERS)
            and all(
                _is_size(a[".offset"]) and _is_size(a[".size"]) and isinstance(a[n], str)
                for a in k.get(".args", [])
                for n in (".value_kind", ".name")
                if n in a or n == ".value_kind"
            )
            for symbol, k in by_symbol.items()
        )
    except (ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException) as error:
        raise ValueError(f"code object: unreadable metadata ({error!r})") from None
    if not fits:
        raise ValueError("code object: unreadable metadata (a field has another type or range)")
    return by_symbol


def _is_size(value: object) -> bool:
    return isinstance(value, int) and 0 <= value < 1 << 32


def _kernel(
    name: str, at: int, image: bytearray, code: tuple[int, int], meta: dict | None
) -> KernelInfo:
    if not 0 <= at <= len(image) - 64:
        raise ValueError(f"code object: the descriptor of kernel {name} is outside the image")
    lds, scratch, kernarg = struct.unpack_from("<III", image, at)
    (entry,) = struct.unpack_from("<q", image, at + 16)
    rsrc3, rsrc1, rsrc2 = struct.unpack_from("<III", image, at + 44)
    properties, preload = struct.unpack_from("<HH", image, at + 56)
    if not code[0] <= at + entry < code[1]:
        raise ValueError(f"code object: the entry of kernel {name} is outside the code")
    total = ((rsrc1 & 63) + 1) * 8
    arch = ((rsrc3 & 63) + 1) * 4
    # MODE: round and denorm in the low byte, then dx10_clamp (8), ieee (9); fp16_ovfl is bit 23.
    mode = (
        (rsrc1 >> 12) & 0xFF
        | ((rsrc1 >> 21) & 1) << 8
        | ((rsrc1 >> 23) & 1) << 9
        | ((rsrc1 >> 26) & 1) << 23
    )
    args = tuple(
        Argument(a.get(".name", f"arg{i}"), a[".offset"], a[".size"], a[".value_kind"])
        for i, a in enumerate((meta or {}).get(".args", []))
    )
    meta = meta or {}
    return KernelInfo(
        name=name,
        args=args,
        lds_bytes=lds,
        vgprs=meta.get(".vgpr_count", total),
        agprs=meta.get(".agpr_count", max(0, total - arch)),
        sgprs=meta.get(".sgpr_count", 102),
        scratch_bytes=scratch,
        max_workgroup=meta.get(".max_flat_workgroup_size", 1024),
        kernarg_bytes=max(kernarg, meta.get(".kernarg_segment_size", 0)),
        entry=at + entry,
        user_sgprs=(rsrc2 >> 1) & 31,
        workgroup_ids=(bool(rsrc2 >> 7 & 1), bool(rsrc2 >> 8 & 1), bool(rsrc2 >> 9 & 1)),
        mode=mode,
        properties=properties,
        preload=(preload & 127, preload >> 7),
        arch_vgprs=min(arch, total, 256),
        acc_vgprs=max(0, min(total - arch, 256)),
        has_metadata=bool(meta),
    )
