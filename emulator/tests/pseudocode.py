# SPDX-License-Identifier: MIT
"""Interprets the ISA manual's pseudocode (tinygrad's PCODE table) for one lane: the oracle of the
instruction tests.

Values are (bits, type): type is a letter u, i, f, b (untyped bits) or n (an unsuffixed literal) and
a width.
Anything outside the subset raises Unsupported, and the test of that instruction needs another
oracle.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from fractions import Fraction

from tinygrad.runtime.autogen.amd.cdna.str_pcode import PCODE


class Unsupported(Exception):
    """The pseudocode uses a construct or function that this interpreter does not know."""


def table() -> dict[str, str]:
    """Mnemonic (lower case, no encoding suffix) -> pseudocode."""
    out: dict[str, str] = {}
    for op, text in PCODE.items():
        out.setdefault(op.name.lower().removesuffix("_e32").removesuffix("_e64"), text)
    return out


# --- values


@dataclass(frozen=True)
class Val:
    bits: int
    kind: str
    width: int

    @property
    def number(self):
        """Python number: int, or float (exact for every width)."""
        if self.kind == "f":
            return to_float(self.bits, self.width)
        if self.kind in "in" and self.bits >> (self.width - 1) & 1:
            return self.bits - (1 << self.width)
        return self.bits


def integer(x: int, kind: str, width: int) -> Val:
    return Val(x & ((1 << width) - 1), kind, width)


def to_float(bits: int, width: int) -> float:
    if width == 64:
        return struct.unpack("<d", bits.to_bytes(8, "little"))[0]
    if width == 32:
        return struct.unpack("<f", bits.to_bytes(4, "little"))[0]
    if width == 16:
        return struct.unpack("<e", bits.to_bytes(2, "little"))[0]
    raise Unsupported(f"float of {width} bits")


_FORMS = {64: (53, -1074, 0x7FF << 52), 32: (24, -149, 0x7F800000), 16: (11, -24, 0x7C00)}


def from_exact(x: Fraction, width: int, negative_zero: bool = False) -> int:
    """Bits of an exact value rounded to nearest even."""
    precision, low, infinity = _FORMS[width]
    sign = 1 << (width - 1) if x < 0 or (x == 0 and negative_zero) else 0
    x = abs(x)
    if x == 0:
        return sign
    e = max(x.numerator.bit_length() - x.denominator.bit_length() - precision - 1, low)
    while x >= Fraction(2) ** (e + precision):
        e += 1
    scaled = x / Fraction(2) ** e
    n = scaled.numerator // scaled.denominator
    rest = scaled - n
    if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and n & 1):
        n += 1
    if n >> precision:
        n >>= 1
        e += 1
    bits = (
        n
        if n >> (precision - 1) == 0
        else ((e - low + 1) << (precision - 1)) + n - (1 << (precision - 1))
    )
    return sign | min(bits, infinity)


def floating(x: float | Fraction, width: int, negative_zero: bool = False) -> Val:
    if isinstance(x, float):
        if math.isnan(x):
            return Val(_FORMS[width][2] | 1 << (_FORMS[width][0] - 2), "f", width)
        if math.isinf(x):
            return Val(_FORMS[width][2] | (1 << (width - 1) if x < 0 else 0), "f", width)
        negative_zero = x == 0 and math.copysign(1, x) < 0
        x = Fraction(x)
    return Val(from_exact(x, width, negative_zero), "f", width)


def resize(v: Val, width: int) -> Val:
    """A float in another width; a NaN keeps the top of its payload, the signalling bit too."""
    if isinstance(v, _Power):
        return _Power(v.power, width)
    if not math.isnan(v.number) or v.width == width:
        return floating(v.number, width)
    (p, _, _), (q, _, infinity) = _FORMS[v.width], _FORMS[width]
    payload = v.bits & ((1 << (p - 1)) - 1)
    payload = payload << (q - p) if q >= p else payload >> (p - q)
    return Val(v.bits >> (v.width - 1) << (width - 1) | infinity | payload, "f", width)


def bf16_round(bits: int) -> int:
    if bits & 0x7FFFFFFF > 0x7F800000:
        return bits >> 16 | 0x40
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


# --- parser

_TOKEN = re.compile(
    r"\s*(?:(?P<cast>\d+'(?:BF|[UIFBL])(?=\())|(?P<sized>\d+'[UIF]?(?:0x[0-9a-fA-F]+|\d+)U?(?:LL)?)|(?P<vec>\d+'[UIFB])"
    r"|(?P<num>0x[0-9a-fA-F]+U?L*F?|\d+\.\d+F?|\d+U?L*F?)|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<op>\+:|\*\*|<<|>>|<=|>=|==|!=|<>|&&|\|\||\+=|-=|[-+*/%&|^~!<>=?:;,.(){}\[\]]))"
)
_PREC = {"||": 1, "&&": 2, "|": 3, "^": 4, "&": 5, "==": 6, "!=": 6, "<>": 6, "<": 7, "<=": 7, ">": 7, ">=": 7,
         "<<": 8, ">>": 8, "+": 9, "-": 9, "*": 10, "/": 10, "%": 10, "**": 11}  # fmt: skip


def tokenize(text: str) -> list[tuple[str, str]]:
    text = re.sub(r"//[^\n]*", "", text)
    out, at = [], 0
    while text[at:].strip():
        m = _TOKEN.match(text, at)
        if not m:
            raise Unsupported(f"token at {text[at : at + 20]!r}")
        out.append((m.lastgroup, m.group(m.lastgroup)))
        at = m.end()
    return out


class Parser:
    """Recursive descent to nested tuples."""

    def __init__(self, text: str) -> None:
        self.tokens, self.at = tokenize(text), 0

    def peek(self, k: int = 0) -> str:
        return self.tokens[self.at + k][1] if self.at + k < len(self.tokens) else ""

    def take(self, want: str | None = None) -> str:
        got = self.peek()
        if want is not None and got != want:
            raise Unsupported(f"expected {want!r}, got {got!r}")
        self.at += 1
        return got

    def block(self, *ends: str) -> list:
        out = []
        while self.peek() and self.peek() not in ends:
            if self.peek() == ";":
                self.take()
                continue
            out.append(self.statement())
        return out

    def statement(self):
        word = self.peek()
        if word == "declare":
            self.take()
            name = self.take()
            self.take(":")
            width = int(self.take().split("'")[0])
            if self.peek() == "[":
                raise Unsupported("declared array")
            return ("declare", name, width)
        if word == "if":
            return self.conditional()
        if word == "for":
            self.take()
            name = self.take()
            self.take("in")
            low = self.expression()
            self.take(":")
            high = self.expression()
            self.take("do")
            body = self.block("endfor")
            self.take("endfor")
            return ("for", name, low, high, body)
        if word == "break":
            self.take()
            return ("break",)
        target = self.postfix()
        op = self.take()
        if op not in ("=", "+=", "-="):
            raise Unsupported(f"statement with {op!r}")
        if self.peek() == "lambda":
            raise Unsupported("lambda")
        value = self.expression()
        if self.peek() == "=":  # a = b = value
            self.take()
            return ("chain", [target, value], self.expression())
        return ("assign", target, op, value)

    def conditional(self):
        arms = []
        self.take()
        while True:
            test = self.expression()
            self.take("then")
            arms.append((test, self.block("elsif", "else", "endif")))
            word = self.take()
            if word == "elsif":
                continue
            if word == "else":
                arms.append((None, self.block("endif")))
                self.take("endif")
            return ("if", arms)

    def expression(self):
        test = self.binary(1)
        if self.peek() == "?":
            self.take()
            yes = self.expression()
            self.take(":")
            return ("?", test, yes, self.expression())
        return test

    def binary(self, level: int):
        left = self.unary()
        while _PREC.get(self.peek(), 0) >= level:
            op = self.take()
            left = ("op", op, left, self.binary(_PREC[op] + (0 if op == "**" else 1)))
        return left

    def unary(self):
        if self.peek() in ("-", "~", "!", "+"):
            return ("unary", self.take(), self.unary())
        return self.postfix()

    def postfix(self):
        node = self.primary()
        while self.peek() in (".", "["):
            if self.take() == ".":
                node = ("type", node, self.take())
                continue
            first = self.expression()
            if self.peek() in (":", "+:"):
                op = self.take()
                node = ("slice", node, op, first, self.expression())
            else:
                node = ("index", node, first)
            self.take("]")
        return node

    def primary(self):
        kind, text = self.tokens[self.at] if self.at < len(self.tokens) else ("", "")
        self.at += 1
        if kind == "cast":
            self.take("(")
            inner = self.expression()
            self.take(")")
            return ("cast", text, inner)
        if kind in ("num", "sized"):
            return (kind, text)
        if text == "(":
            inner = self.expression()
            self.take(")")
            return inner
        if text == "{":
            parts = [self.expression()]
            while self.peek() == ",":
                self.take()
                parts.append(self.expression())
            self.take("}")
            return ("concat", parts)
        if kind == "name" and self.peek() == "(":
            self.take()
            args = [] if self.peek() == ")" else [self.expression()]
            while self.peek() == ",":
                self.take()
                args.append(self.expression())
            self.take(")")
            return ("call", text, args)
        if kind == "name":
            return ("name", text)
        raise Unsupported(f"expression at {text!r}")


# --- evaluation


class _Break(Exception):
    pass


class Machine:
    """State of one lane; S0..S2, D0, D1, VCC, EXEC, SCC are untyped bit strings."""

    def __init__(self, state: dict[str, Val], lane: int) -> None:
        self.state = dict(state)
        self.state["laneId"] = integer(lane, "i", 32)

    def run(self, block: list) -> dict[str, Val]:
        for statement in block:
            self.step(statement)
        return self.state

    def step(self, s) -> None:
        if s[0] == "declare":
            self.state[s[1]] = Val(0, "b", s[2])
        elif s[0] == "if":
            for test, body in s[1]:
                if test is None or self.truth(test):
                    self.run(body)
                    break
        elif s[0] == "for":
            low, high = self.eval(s[2]).number, self.eval(s[3]).number
            try:
                for i in range(low, high + 1):
                    self.state[s[1]] = integer(i, "i", 32)
                    self.run(s[4])
            except _Break:
                pass
        elif s[0] == "break":
            raise _Break
        elif s[0] == "chain":
            result = self.eval(s[2])
            for target in s[1]:
                self.store(target, result)
        else:
            _, target, op, value = s
            result = self.eval(value)
            if op != "=":
                result = self.arith(op[0], self.eval(target), result)
            self.store(target, result)

    def truth(self, node) -> bool:
        v = self.eval(node)
        return v.number != 0

    def store(self, target, v: Val) -> None:
        if target[0] == "concat":
            at = 0
            for part in reversed(target[1]):
                width = self.width_of(part)
                self.store(part, Val(v.bits >> at & ((1 << width) - 1), "b", width))
                at += width
            return
        if target[0] == "name":
            old = self.state.get(target[1])
            if target[1] in ("D0", "EXEC", "VCC") and old is not None:
                self.state[target[1]] = Val(v.bits & ((1 << old.width) - 1), "b", old.width)
            elif target[1] == "SCC":
                self.state["SCC"] = Val(v.bits & 1, "b", 1)
            else:
                self.state[target[1]] = v
            return
        name, low, width, kind = self.place(target)
        v = self.convert(v, kind, width)
        old = self.state.get(name) or Val(0, "b", max(32, low + width))
        total = max(old.width, low + width)
        ones = ((1 << width) - 1) << low
        new_kind = (
            kind if low == 0 and width == total and name not in ("D0", "D1", "VCC", "EXEC") else "b"
        )
        self.state[name] = Val(old.bits & ~ones | (v.bits << low) & ones, new_kind, total)

    def width_of(self, target) -> int:
        return self.place(target)[2]

    def place(self, target) -> tuple[str, int, int, str]:
        """name, low bit, width, kind of an assignable place."""
        if target[0] == "name":
            v = self.state.get(target[1]) or Val(0, "b", 32)
            return target[1], 0, v.width, v.kind
        if target[0] == "type":
            name, low, width, _ = self.place(target[1])
            kind, size = split_type(target[2])
            # A whole variable may be wider or narrower than its typed view; a slice keeps its bits.
            return name, low, size if target[1][0] == "name" else width, kind
        name, low, width, kind = self.place(target[1])
        if target[0] == "index":
            return name, low + self.eval(target[2]).number, 1, "b"
        first, second = self.eval(target[3]).number, self.eval(target[4]).number
        if target[2] == "+:":
            return name, low + first, second, "b"
        return name, low + min(first, second), abs(first - second) + 1, "b"

    def convert(self, v: Val, kind: str, width: int) -> Val:
        """Assignment to a typed place."""
        if kind == "f" and v.kind == "f" and v.width != width:
            return floating(v.number, width)
        if kind == "f" and v.kind in "uin" and v.kind != "f":
            raise Unsupported("integer stored to a float")
        if v.kind == "f" and kind in "ui":
            raise Unsupported("float stored to an integer")
        if v.kind == "i" or v.kind == "n":
            return integer(v.number, kind, width)
        return integer(v.bits, kind, width)

    def eval(self, node) -> Val:
        return getattr(self, "_" + _NODE.get(node[0], node[0]))(*node[1:])

    def _name(self, name: str) -> Val:
        if name == "INF":
            return floating(math.inf, 64)
        if name not in self.state:
            raise Unsupported(f"variable {name}")
        return self.state[name]

    def _num(self, text: str) -> Val:
        if not text.startswith("0x") and ("." in text or text.endswith("F")):
            return floating(float(text.rstrip("F")), 32 if text.endswith("F") else 64)
        body = text.rstrip("UL")
        width = 64 if "LL" in text else 32
        return integer(int(body, 0), "u" if "U" in text else "n", width)

    def _sized(self, text: str) -> Val:
        width, rest = text.split("'")
        unsigned = rest.rstrip("L").endswith("U") or rest.startswith("0x")
        return integer(int(rest.strip("UIFL"), 0), "u" if unsigned else "n", int(width))

    def _cast(self, text: str, inner) -> Val:
        width, kind = text.split("'")
        width, v = int(width), self.eval(inner)
        if kind == "BF":
            raise Unsupported("bf16 cast")
        if kind == "F":
            if v.kind == "bf":
                v = Val(v.bits << 16, "f", 32)
            return (
                resize(v, width) if v.kind == "f" else Val(v.bits & ((1 << width) - 1), "f", width)
            )
        kind = {"U": "u", "I": "i", "B": "b"}[kind]
        if v.kind == "f":
            raise Unsupported("float to integer cast")
        return integer(v.number if v.kind in "in" else v.bits, kind, width)

    def _type(self, node, name: str) -> Val:
        if node[0] == "unary" and node[1] in "+-":
            return self.eval(node)
        if node[0] == "name" and node[1] in ("INF", "NAN", "DENORM"):
            _, width = split_type(name)
            if node[1] == "DENORM":
                raise Unsupported("DENORM")
            return floating(math.inf if node[1] == "INF" else math.nan, width)
        v = self.eval(node)
        kind, width = split_type(name)
        if name == "bf16":
            return Val(v.bits & 0xFFFF, "bf", 16)
        if name.startswith(("fp", "bf")):
            raise Unsupported(name)
        if kind == "f" and v.kind == "f" and v.width != width:
            return floating(v.number, width)
        if v.kind == "i" and kind in "ui" and width > v.width:
            return integer(v.number, kind, width)
        return Val(v.bits & ((1 << width) - 1), kind, width)

    def _slice(self, node, op: str, a, b) -> Val:
        v, first, second = self.eval(node), self.eval(a).number, self.eval(b).number
        if op == "+:":
            low, width = first, second
        else:
            low, width = min(first, second), abs(first - second) + 1
        bits = v.bits >> low & ((1 << width) - 1)
        if op == ":" and first < second:  # [0 : 31] reverses
            bits = int(f"{bits:0{width}b}"[::-1], 2)
        return Val(bits, "u", width)

    def _index(self, node, at) -> Val:
        return Val(self.eval(node).bits >> self.eval(at).number & 1, "u", 1)

    def _concat(self, parts) -> Val:
        bits = width = 0
        for part in parts:
            v = self.eval(part)
            bits, width = bits << v.width | v.bits, width + v.width
        return Val(bits, "u", width)

    def _ternary(self, test, yes, no) -> Val:
        return self.eval(yes if self.truth(test) else no)

    def _unary(self, op: str, node) -> Val:
        v = self.eval(node)
        if op == "+":
            return v
        if op == "!":
            return integer(int(v.number == 0), "u", 1)
        if op == "~":
            return integer(~v.bits, v.kind, v.width)
        if v.kind == "f":
            return Val(v.bits ^ 1 << (v.width - 1), "f", v.width)
        return integer(-v.number, v.kind, v.width)

    def _op(self, op: str, left, right) -> Val:
        if op in ("&&", "||"):
            a = self.truth(left)
            return integer(
                int(a and self.truth(right) if op == "&&" else a or self.truth(right)), "u", 1
            )
        a, b = self.eval(left), self.eval(right)
        if op == "==" and right[0] == "unary" and b.kind == "f" and b.number == 0:
            return integer(int(a.bits == b.bits), "u", 1)  # "== -0.0" means the sign as well
        return self.arith(op, a, b)

    def arith(self, op: str, a: Val, b: Val) -> Val:
        if op in ("==", "!=", "<>", "<", "<=", ">", ">="):
            x, y = a.number, b.number
            if {a.kind, b.kind} == {"n", "u"} or {a.kind, b.kind} == {"n", "b"}:
                width = max(a.width, b.width)
                x, y = integer(x, "u", width).bits, integer(y, "u", width).bits
            r = {
                "==": x == y,
                "!=": x != y,
                "<>": (x < y or x > y),
                "<": x < y,
                "<=": x <= y,
                ">": x > y,
                ">=": x >= y,
            }
            return integer(int(r[op]), "u", 1)
        if a.kind == "f" or b.kind == "f":
            return self.float_arith(op, a, b)
        if op in ("<<", ">>"):
            n = b.number
            x = a.number if op == ">>" else a.bits
            width = max(a.width, 32)
            return integer(x << n if op == "<<" else x >> n, a.kind, width)
        kind = (
            "u"
            if "u" in (a.kind, b.kind) or "b" in (a.kind, b.kind)
            else "i"
            if "i" in (a.kind, b.kind)
            else "n"
        )
        width = max(a.width, b.width)
        x, y = (a.number, b.number) if kind != "u" else (signed_or_bits(a), signed_or_bits(b))
        if op == "**":
            return integer(x**y, kind, width)
        if op in "/%" and y == 0:
            raise Unsupported("division by zero")
        r = {"+": lambda: x + y, "-": lambda: x - y, "*": lambda: x * y, "&": lambda: x & y, "|": lambda: x | y,
             "^": lambda: x ^ y, "/": lambda: x // y, "%": lambda: x % y}[op]()  # fmt: skip
        if kind != "n" and width < 32 and op in "+-*":
            return integer(r, kind, width if a.kind != "u" or b.kind != "u" or width == 16 else 32)
        return integer(r, kind, width)

    def float_arith(self, op: str, a: Val, b: Val) -> Val:
        width = max(v.width for v in (a, b) if v.kind == "f")
        if op == "**":
            base, power = a.number, b.number
            if base != 2:
                raise Unsupported("power")
            return _Power(max(-5000, min(5000, power)), width)
        x, y = a.number, b.number
        if isinstance(b, _Power) and op == "*":
            if not math.isfinite(x):
                return floating(x, width)
            return floating(Fraction(x) * Fraction(2) ** b.power, a.width, math.copysign(1, x) < 0)
        if math.isfinite(x) and math.isfinite(y) and op in "+-*":
            exact = {
                "+": Fraction(x) + Fraction(y),
                "-": Fraction(x) - Fraction(y),
                "*": Fraction(x) * Fraction(y),
            }[op]
            if exact == 0:
                negative = {"+": x + y, "-": x - y, "*": x * y}[op] if exact == 0 else 0
                if op == "*":
                    negative = math.copysign(1, x) * math.copysign(1, y) * 0.0
                return floating(Fraction(0), width, math.copysign(1, negative) < 0)
            return floating(exact, width)
        if op == "+":
            return floating(float(x) + float(y), width)
        if op == "-":
            return floating(float(x) - float(y), width)
        if op == "*":
            return floating(float(x) * float(y), width)
        raise Unsupported(f"float {op}")

    def _call(self, name: str, args) -> Val:
        if name in _FUNCTIONS:
            return _FUNCTIONS[name](*[self.eval(a) for a in args])
        known = table()
        if name in known and name.startswith("v_"):
            state = {f"S{i}": self.eval(a) for i, a in enumerate(args)}
            state |= {"D0": Val(0, "b", 32), "WAVE_MODE": Val(1, "b", 1)}
            out = execute(known[name], state, 0)["D0"]
            kind, width = split_type(name.split("_")[-1])
            return Val(out.bits & ((1 << width) - 1), kind, width)
        raise Unsupported(f"function {name}")


class _Power(Val):
    """2 ** n, kept exact: it need not fit the format that it scales."""

    def __init__(self, power: int, width: int) -> None:
        super().__init__(0, "f", width)
        object.__setattr__(self, "power", power)

    @property
    def number(self):
        return float(Fraction(2) ** self.power) if abs(self.power) < 1000 else math.inf


_NODE = {"?": "ternary"}


def signed_or_bits(v: Val) -> int:
    return v.number if v.kind in "in" else v.bits


def split_type(name: str) -> tuple[str, int]:
    m = re.fullmatch(r"([uifb])(\d+)", name)
    if not m:
        if name == "bf16":
            return "bf", 16
        raise Unsupported(f"type {name}")
    return m.group(1), int(m.group(2))


def _int_of(width: int, signed: bool):
    low, high = (-(1 << (width - 1)), (1 << (width - 1)) - 1) if signed else (0, (1 << width) - 1)

    def convert(v: Val) -> Val:
        x = v.number
        if isinstance(x, float):
            x = 0 if math.isnan(x) else (high if x > 0 else low) if math.isinf(x) else math.trunc(x)
        return integer(max(low, min(high, x)), "i" if signed else "u", width)

    return convert


def _float_of(width: int):
    return lambda v: floating(Fraction(v.number) if v.kind != "f" else v.number, width)


def _fma(a: Val, b: Val, c: Val) -> Val:
    x, y, z = a.number, b.number, c.number
    if all(math.isfinite(v) for v in (x, y, z)):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        negative = math.copysign(1, x) * math.copysign(1, y) < 0 and math.copysign(1, z) < 0
        return floating(
            exact, a.width, exact == 0 and (negative if x * y == 0 or z == 0 else False)
        )
    return floating(float(x) * float(y) + float(z), a.width)


def _is_nan(v: Val) -> bool:
    return math.isnan(v.number)


def _signalling(v: Val) -> bool:
    # The pseudocode widens to float64 first; widening must keep the signalling bit, see `widen`.
    return _is_nan(v) and not v.bits >> (_FORMS[v.width][0] - 2) & 1


def _flag(x: bool) -> Val:
    return integer(int(x), "u", 1)


def _round_with(fn):
    def apply(v: Val) -> Val:
        x = v.number
        if not math.isfinite(x):
            return floating(x, v.width)
        return floating(Fraction(fn(x)), v.width, math.copysign(1, x) < 0)

    return apply


def _exponent(v: Val) -> Val:
    precision = _FORMS[v.width][0]
    return integer(v.bits >> (precision - 1) & ((1 << (v.width - precision)) - 1), "i", 32)


def _signext_from_bit(v: Val, n: Val) -> Val:
    count = n.number
    if count == 0:
        return integer(0, "i", v.width)
    bits = v.bits & ((1 << count) - 1)
    return integer(bits - (1 << count) if bits >> (count - 1) & 1 else bits, "i", v.width)


_FUNCTIONS = {
    "fma": _fma,
    "isNAN": lambda v: _flag(_is_nan(v)),
    "isSignalNAN": lambda v: _flag(_signalling(v)),
    "isQuietNAN": lambda v: _flag(_is_nan(v) and not _signalling(v)),
    "cvtToQuietNAN": lambda v: Val(v.bits | 1 << (_FORMS[v.width][0] - 2), "f", v.width),
    "sign": lambda v: integer(v.bits >> (v.width - 1), "u", 1),
    "exponent": _exponent,
    "abs": lambda v: Val(v.bits & ~(1 << (v.width - 1)), "f", v.width),
    "floor": _round_with(math.floor),
    "trunc": _round_with(math.trunc),
    "fract": lambda v: floating(v.number - math.floor(v.number), v.width) if math.isfinite(v.number) else floating(math.nan, v.width),
    "isEven": lambda v: _flag(math.isfinite(v.number) and v.number % 2 == 0),
    "signext": lambda v: integer(v.number if v.kind == "i" else Val(v.bits, "i", v.width).number, "i", 64),
    "signext_from_bit": _signext_from_bit,
    "i8_to_i32": lambda v: integer(Val(v.bits, "i", 8).number, "i", 32),
    "u8_to_u32": lambda v: integer(v.bits, "u", 32),
    "f16_to_f32": _float_of(32), "f32_to_f16": _float_of(16), "f64_to_f32": _float_of(32), "f32_to_f64": _float_of(64),
    "u32_to_f32": _float_of(32), "i32_to_f32": _float_of(32), "i32_to_f64": _float_of(64), "u32_to_f64": _float_of(64),
    "u16_to_f16": _float_of(16), "i16_to_f16": _float_of(16),
    "f32_to_i32": _int_of(32, True), "f32_to_u32": _int_of(32, False), "f64_to_i32": _int_of(32, True),
    "f64_to_u32": _int_of(32, False), "f16_to_u16": _int_of(16, False), "f16_to_i16": _int_of(16, True),
    "i32_to_i16": _int_of(16, True), "u32_to_u16": _int_of(16, False),
    "bf16_to_f32": lambda v: Val(v.bits << 16 & 0xFFFFFFFF, "f", 32),
    "f32_to_bf16": lambda v: Val(bf16_round(v.bits), "bf", 16),
    "v_prng_b32": lambda v: integer(v.bits << 1 ^ (197 if v.bits >> 31 else 0), "u", 32),
    "ldexp": lambda v, n: floating(Fraction(v.number) * Fraction(2) ** n.number, v.width, math.copysign(1, v.number) < 0)
    if math.isfinite(v.number) else v,
}  # fmt: skip


_parsed: dict[str, list] = {}


def execute(text: str, state: dict[str, Val], lane: int) -> dict[str, Val]:
    """Runs a pseudocode text on the state of one lane; returns the state afterwards."""
    if text not in _parsed:
        text_ready = text.replace("WAVE_MODE.IEEE", "WAVE_MODE").replace(".BF(", ".bf16(")
        _parsed[text] = Parser(text_ready).block()
    return Machine(state, lane).run(_parsed[text])
