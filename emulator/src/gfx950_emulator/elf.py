# SPDX-License-Identifier: MIT
"""AMDGPU code objects: ELF image, kernel descriptors, metadata; clang offload bundles around
them."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path

import msgpack

_MACH_GFX950 = 0x4F
_BUNDLE = b"__CLANG_OFFLOAD_BUNDLE__"
_SHT_SYMTAB, _SHT_RELA, _SHT_DYNSYM = 2, 4, 11


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
    .hip_fatbin."""
    data = (
        bytes(source)
        if isinstance(source, (bytes, bytearray, memoryview))
        else Path(source).read_bytes()
    )
    if data[:4] == b"CCOB":
        raise ValueError(
            "code object: compressed offload bundles are not supported; use --no-offload-compress"
        )
    if data.startswith(_BUNDLE):
        return _from_bundle(data)
    if data[:4] != b"\x7fELF":
        raise ValueError("code object: expected an ELF or a clang offload bundle")
    if struct.unpack_from("<H", data, 18)[0] != 224:  # EM_AMDGPU
        fatbin = _sections(data).get(".hip_fatbin")
        if fatbin is None:
            raise ValueError("code object: expected an AMDGPU ELF, got another machine's")
        return read(_section_bytes(data, fatbin))
    return data


def _from_bundle(data: bytes) -> bytes:
    at = len(_BUNDLE)
    (count,) = struct.unpack_from("<Q", data, at)
    at += 8
    seen = []
    for _ in range(count):
        offset, size, length = struct.unpack_from("<QQQ", data, at)
        at += 24
        triple = data[at : at + length].decode()
        at += length
        seen.append(triple)
        if "gfx950" in triple and size:
            return read(data[offset : offset + size])
    raise ValueError(f"offload bundle: no gfx950 entry among {seen}")


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
    (offset,) = struct.unpack_from("<Q", data, 40)
    size, count, strings = struct.unpack_from("<HHH", data, 58)
    raw = [struct.unpack_from("<IIQQQQIIQQ", data, offset + i * size) for i in range(count)]
    if not raw:
        return {}
    base = raw[strings][4]
    out = {}
    for name, kind, flags, address, at, length, link, _, _, entry in raw:
        text = data[base + name : data.index(b"\0", base + name)].decode()
        out[text or f"#{len(out)}"] = _Section(text, kind, flags, address, at, length, link, entry)
    return out


def _section_bytes(data: bytes, s: _Section) -> bytes:
    return b"" if s.type == 8 else data[s.offset : s.offset + s.size]


def load(source: str | Path | bytes) -> CodeObject:
    """Parses a code object. Raises ValueError naming what does not fit gfx950 or is not
    supported."""
    data = read(source)
    (flags,) = struct.unpack_from("<I", data, 48)
    if flags & 0xFF != _MACH_GFX950:
        raise ValueError(f"code object: expected gfx950 (mach 0x4f), got mach 0x{flags & 0xFF:02x}")
    version = {3: 5, 4: 6}.get(data[8])
    if data[7] != 64 or version is None:
        raise ValueError(
            f"code object: expected version 5 or 6, got OS ABI {data[7]}, ABI version {data[8]}"
        )
    sections = _sections(data)
    image, writable, executable = _image(data)
    _refuse_relocations(data, sections)
    metadata = _metadata(data)
    symbols = _symbols(data, sections)
    described = {k[".symbol"]: k for k in metadata.get("amdhsa.kernels", [])}
    kernels = {}
    for name, (value, _, shndx) in symbols.items():
        if name.endswith(".kd") and shndx != 0:
            info = _kernel(name[:-3], value, image, described.get(name))
            kernels[info.name] = info
    if not kernels:
        raise ValueError("code object: no kernel descriptor (symbol *.kd)")
    debug = {n: _section_bytes(data, s) for n, s in sections.items() if n.startswith(".debug_")}
    return CodeObject(image, writable, executable, version, kernels, debug)


def _image(data: bytes) -> tuple[bytearray, tuple[int, int], tuple[int, int]]:
    (offset,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    loads = []
    for i in range(count):
        kind, flags, at, address, _, filesz, memsz, _ = struct.unpack_from(
            "<IIQQQQQQ", data, offset + i * size
        )
        if kind == 1:
            loads.append((flags, at, address, filesz, memsz))
    if not loads:
        raise ValueError(
            "code object: no loadable segment (relocatable object? link it with ld.lld -shared)"
        )
    image = bytearray(max(a + m for _, _, a, _, m in loads))
    writable, executable = (0, 0), (0, 0)
    for flags, at, address, filesz, memsz in loads:
        image[address : address + filesz] = data[at : at + filesz]
        if flags & 2 and not flags & 1:
            writable = (writable[0] or address, address + memsz)
        if flags & 1:
            if executable != (0, 0):
                raise ValueError("code object: more than one executable segment")
            executable = (address, address + filesz)
    return image, writable, executable


def _symbols(data: bytes, sections: dict[str, _Section]) -> dict[str, tuple[int, int, int]]:
    """name -> (value, size, section index)"""
    by_index = list(sections.values())
    out = {}
    for s in by_index:
        if s.type not in (_SHT_SYMTAB, _SHT_DYNSYM):
            continue
        strings = by_index[s.link].offset
        for at in range(s.offset, s.offset + s.size, 24):
            name, _, _, shndx, value, size = struct.unpack_from("<IBBHQQ", data, at)
            text = data[strings + name : data.index(b"\0", strings + name)].decode()
            if text:
                out[text] = (value, size, shndx)
    return out


def _refuse_relocations(data: bytes, sections: dict[str, _Section]) -> None:
    for s in sections.values():
        if s.type == _SHT_RELA and s.size:
            at = range(s.offset, s.offset + s.size, 24)
            kinds = {struct.unpack_from("<QQq", data, a)[1] & 0xFFFFFFFF for a in at}
            raise ValueError(f"code object: dynamic relocations {sorted(kinds)} are not supported")


def _metadata(data: bytes) -> dict:
    (offset,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    for i in range(count):
        kind, _, at, _, _, filesz, _, _ = struct.unpack_from("<IIQQQQQQ", data, offset + i * size)
        if kind != 4:  # PT_NOTE
            continue
        end = at + filesz
        while at + 12 <= end:
            namesz, descsz, note = struct.unpack_from("<III", data, at)
            desc = at + 12 + (namesz + 3) // 4 * 4
            if note == 32 and data[at + 12 : at + 12 + namesz].rstrip(b"\0") == b"AMDGPU":
                return msgpack.unpackb(bytes(data[desc : desc + descsz]))
            at = desc + (descsz + 3) // 4 * 4
    return {}


def _kernel(name: str, at: int, image: bytearray, meta: dict | None) -> KernelInfo:
    lds, scratch, kernarg = struct.unpack_from("<III", image, at)
    (entry,) = struct.unpack_from("<q", image, at + 16)
    rsrc3, rsrc1, rsrc2 = struct.unpack_from("<III", image, at + 44)
    properties, preload = struct.unpack_from("<HH", image, at + 56)
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
