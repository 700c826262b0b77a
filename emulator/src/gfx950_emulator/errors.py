# SPDX-License-Identifier: MIT
"""The one exception that execution raises."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Access:
    """An instruction that a wave executed: text, "file:line" or None, byte offset in the code."""

    instruction: str
    source: str | None
    pc: int
    wave: int

    def __str__(self) -> str:
        line = f", {self.source}" if self.source else ""
        return f"{self.instruction} at 0x{self.pc:x}, wave {self.wave}{line}"


class EmulatorError(RuntimeError):
    """A fault of the executed kernel, or an instruction that is not implemented.

    Attributes: kind ("unimplemented", "out of buffer", "uninitialized memory", "uninitialized
    register",
    "uninitialized LDS", "LDS race", "missing wait", "misaligned access", ...), kernel, instruction,
    pc (byte
    offset in the code), lane (or None), wave, workgroup (x, y, z), address (or None), source
    ("file:line" or None), earlier (an LDS race or a missing wait: the Access that this one collides
    with; else None).
    """

    def __init__(
        self,
        kernel: str,
        instruction: str,
        fault: dict,
        source: str | None,
        earlier: Access | None = None,
    ) -> None:
        self.kind: str = fault["kind"]
        self.kernel, self.instruction, self.source = kernel, instruction, source
        self.earlier = earlier
        self.pc: int = fault["pc"]
        self.lane: int | None = fault["lane"]
        self.wave: int = fault["wave"]
        self.workgroup: tuple[int, int, int] = fault["workgroup"]
        self.address: int | None = fault["address"]
        where = [f"kernel {kernel}", f"instruction {instruction} at 0x{self.pc:x}"]
        if self.address is not None:
            where.append(f"address 0x{self.address:x}")
        if self.lane is not None:
            where.append(f"lane {self.lane}")
        where.append(f"wave {self.wave}, workgroup {self.workgroup}")
        if source:
            where.append(source)
        if earlier is not None:
            where.append(f"earlier: {earlier}")
        super().__init__(f"{self.kind}: {fault['what']} [{'; '.join(where)}]")
