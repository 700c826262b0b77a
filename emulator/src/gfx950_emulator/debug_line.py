# SPDX-License-Identifier: MIT
"""Source line of an address from .debug_line (DWARF 4 and 5)."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field


def lookup(sections: dict[str, bytes], address: int) -> str | None:
    """ "file:line" of the code address, or None without debug information."""
    data = sections.get(".debug_line")
    if not data:
        return None
    at = 0
    while at + 4 <= len(data):
        unit = _Unit(sections, data, at)
        if (found := unit.find(address)) is not None:
            return found
        at = unit.end
    return None


@dataclass
class _Reader:
    data: bytes
    at: int

    def unpack(self, fmt: str) -> int:
        (value,) = struct.unpack_from("<" + fmt, self.data, self.at)
        self.at += struct.calcsize("<" + fmt)
        return value

    def uleb(self) -> int:
        value = shift = 0
        while True:
            byte = self.unpack("B")
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def sleb(self) -> int:
        start = self.at
        value = self.uleb()
        bits = 7 * (self.at - start)
        return value - (1 << bits) if value >> (bits - 1) else value

    def text(self) -> str:
        end = self.data.index(b"\0", self.at)
        value = self.data[self.at : end].decode(errors="replace")
        self.at = end + 1
        return value


@dataclass
class _Unit:
    """One line table of the 32-bit DWARF format."""

    sections: dict[str, bytes]
    data: bytes
    start: int
    files: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        r = _Reader(self.data, self.start)
        self.end = r.unpack("I") + r.at
        self.version = r.unpack("H")
        if self.version not in (4, 5):
            self.program = self.end
            return
        if self.version == 5:
            r.unpack("H")  # address and segment selector sizes
        self.program = r.unpack("I") + r.at
        self.min_length = r.unpack("B")
        r.unpack("B")  # operations per instruction
        r.unpack("B")  # default_is_stmt
        self.line_base, self.line_range, self.opcode_base = (
            r.unpack("b"),
            r.unpack("B"),
            r.unpack("B"),
        )
        self.lengths = [r.unpack("B") for _ in range(self.opcode_base - 1)]
        if self.version == 5:
            self._table(r)  # directories
            self.files = self._table(r)
        else:
            while r.text():
                pass
            self.files = [""]
            while name := r.text():
                self.files.append(name)
                for _ in range(3):
                    r.uleb()

    def _table(self, r: _Reader) -> list[str]:
        form = [(r.uleb(), r.uleb()) for _ in range(r.unpack("B"))]
        out = []
        for _ in range(r.uleb()):
            path = ""
            for content, kind in form:
                value = self._form(r, kind)
                if content == 1:  # DW_LNCT_path
                    path = str(value)
            out.append(path)
        return out

    def _form(self, r: _Reader, kind: int) -> str | int:
        if kind == 0x08:  # DW_FORM_string
            return r.text()
        if kind in (0x0E, 0x1F):  # strp, line_strp
            section = self.sections.get(".debug_line_str" if kind == 0x1F else ".debug_str", b"")
            return _Reader(section, r.unpack("I")).text()
        if kind == 0x1E:  # data16
            r.at += 16
            return 0
        if kind == 0x0F:  # udata
            return r.uleb()
        return r.unpack({0x0B: "B", 0x05: "H", 0x06: "I"}[kind])

    def find(self, address: int) -> str | None:
        if self.version not in (4, 5):
            return None
        r = _Reader(self.data, self.program)
        place, file, line = 0, 1, 1
        before: tuple[int, int, int] | None = None  # the row before: address, file, line
        while r.at < self.end:
            op = r.unpack("B")
            row = ended = False
            if op >= self.opcode_base:
                step = op - self.opcode_base
                place += step // self.line_range * self.min_length
                line += self.line_base + step % self.line_range
                row = True
            elif op == 0:
                size = r.uleb()
                stop = r.at + size
                extended = r.unpack("B")
                if extended == 1:
                    row = ended = True
                elif extended == 2:
                    place = int.from_bytes(self.data[r.at : stop], "little")
                r.at = stop
            elif op == 1:
                row = True
            elif op == 2:
                place += r.uleb() * self.min_length
            elif op == 3:
                line += r.sleb()
            elif op == 4:
                file = r.uleb()
            elif op == 8:
                place += (255 - self.opcode_base) // self.line_range * self.min_length
            elif op == 9:
                place += r.unpack("H")
            else:
                for _ in range(self.lengths[op - 1]):
                    r.uleb()
            if row:
                if before and before[0] <= address < place:
                    name = self.files[before[1]] if before[1] < len(self.files) else "?"
                    return f"{name}:{before[2]}"
                before = None if ended else (place, file, line)
            if ended:
                place, file, line = 0, 1, 1
        return None
