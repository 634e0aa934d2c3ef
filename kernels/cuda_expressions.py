"""C expressions of a generated source, read once and evaluated for each thread.

Only the forms that TVM emits are known; any other raises SourceError.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kernels.cuda_instructions import VALUE_HELPERS, Helper

# A value is an integer, a tensor map or register array by name, or None: data that this reader does not follow.
Value = Any
Evaluate = Callable[[Any], Value]
TYPE_BYTES = {
    "void": 1, "bool": 1, "uchar": 1, "ushort": 2, "half": 2, "nv_bfloat16": 2, "int": 4, "uint": 4, "float": 4,
    "int64_t": 8, "uint64_t": 8, "unsigned long long": 8, "uint2": 8,
    "__uint128_t": 16,
}  # fmt: skip


class SourceError(ValueError):
    """A form that the reader does not know. `line` counts from 1 in the generated source."""

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True, slots=True)
class Expression:
    """A C expression.

    text: as written
    evaluate: value for a thread
    pointee: bytes of what it points at, 0 where it is no pointer
    """

    text: str
    evaluate: Evaluate
    pointee: int = 0


@dataclass(slots=True)
class Scope:
    """Names that expressions may use.

    helpers: device functions by name
    arrays: register arrays by name, with their element type
    pointers: pointer variables by name, with the bytes of what they point at
    floats: register arrays of float32 that a text names, as far as it was asked for
    """

    helpers: dict[str, Helper]
    arrays: dict[str, str] = field(default_factory=dict)
    pointers: dict[str, int] = field(default_factory=dict)
    maps: frozenset[str] = frozenset()
    cache: dict[str, Expression] = field(default_factory=dict)
    floats: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def floats_in(self, text: str) -> tuple[str, ...]:
        """Arrays of float32 that a text names."""
        found = self.floats.get(text)
        if found is None:
            words = dict.fromkeys(re.findall(r"[A-Za-z_]\w*", text))
            found = self.floats[text] = tuple(word for word in words if self.arrays.get(word) == "float")
        return found

    def expression(self, text: str) -> Expression:
        """Raises SourceError."""
        found = self.cache.get(text)
        if found is None:
            found = self.cache[text] = _Parser(text, self).whole()
        return found


_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:ULL)?)|(?P<name>(?:threadIdx|blockIdx)\.[xyz]|unsigned long long|[A-Za-z_]\w*)"
    r"|(?P<operator><<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^<>!~?:()\[\],.]))"
)
_LEVELS = (
    ("||",),
    ("&&",),
    ("|",),
    ("^",),
    ("&",),
    ("==", "!="),
    ("<", ">", "<=", ">="),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "%"),
)


def _divide(a: int, b: int) -> int:
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "||": lambda a, b: int(bool(a) or bool(b)),
    "&&": lambda a, b: int(bool(a) and bool(b)),
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
    "&": lambda a, b: a & b,
    "==": lambda a, b: int(a == b),
    "!=": lambda a, b: int(a != b),
    "<": lambda a, b: int(a < b),
    ">": lambda a, b: int(a > b),
    "<=": lambda a, b: int(a <= b),
    ">=": lambda a, b: int(a >= b),
    "<<": lambda a, b: a << b,
    ">>": lambda a, b: a >> b,
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": _divide,
    "%": lambda a, b: a - b * _divide(a, b),
}


class _Parser:
    """Recursive descent over one expression."""

    def __init__(self, text: str, scope: Scope) -> None:
        self.text, self.scope, self.at = text, scope, 0
        self.tokens: list[str] = []
        position, end = 0, len(text.rstrip())
        while position < end:
            match = _TOKEN.match(text, position)
            if match is None:
                raise SourceError(f"cannot read {text[position : position + 40]!r}")
            self.tokens.append(match[0].strip())
            position = match.end()
        self.tokens.append("")

    def whole(self) -> Expression:
        result = self.conditional()
        if self.peek():
            raise SourceError(f"cannot read the end of {self.text!r}")
        return Expression(self.text, result.evaluate, result.pointee)

    def peek(self) -> str:
        return self.tokens[self.at]

    def take(self, expected: str = "") -> str:
        token = self.tokens[self.at]
        if expected and token != expected:
            raise SourceError(f"expected {expected!r} in {self.text!r}, found {token!r}")
        self.at += 1
        return token

    def conditional(self) -> Expression:
        condition = self.binary(0)
        if self.peek() != "?":
            return condition
        self.take()
        yes = self.conditional()
        self.take(":")
        no = self.conditional()

        def evaluate(thread: Any) -> Value:
            return yes.evaluate(thread) if _known(condition.evaluate(thread)) else no.evaluate(thread)

        return Expression("", evaluate)

    def binary(self, level: int) -> Expression:
        if level == len(_LEVELS):
            return self.unary()
        left = self.binary(level + 1)
        while self.peek() in _LEVELS[level]:
            left = _combine(_OPERATIONS[self.take()], left, self.binary(level + 1))
        return left

    def unary(self) -> Expression:
        token = self.peek()
        if token == "(" and self.tokens[self.at + 1] in TYPE_BYTES:
            return self.cast()
        if token in ("-", "!", "~"):
            self.take()
            inner = self.unary()
            if token == "!":
                return Expression("", lambda thread: int(not _known(inner.evaluate(thread))))
            sign, offset = (-1, 0) if token == "-" else (-1, -1)
            return Expression("", lambda thread: sign * _known(inner.evaluate(thread)) + offset)
        if token == "*":  # `*(type *)(&(variable))`: the same bits under another type
            self.take()
            if self.tokens[self.at + 2 : self.at + 7] != ["*", ")", "(", "&", "("]:
                raise SourceError(f"cannot follow the pointer in {self.text!r}")
            return Expression("", self.unary().evaluate)
        if token == "&":
            self.take()
            return self.address()
        return self.postfix(self.primary())

    def cast(self) -> Expression:
        self.take("(")
        name = self.take()
        stars = 0
        while self.peek() == "*":
            self.take()
            stars += 1
        self.take(")")
        inner = self.unary()
        if stars:
            return Expression("", inner.evaluate, TYPE_BYTES[name])
        bits = 8 * TYPE_BYTES[name]
        if name in ("float", "half", "nv_bfloat16", "uint2", "void"):
            return Expression("", lambda thread: None)
        return Expression("", lambda thread: _wrap(inner.evaluate(thread), name, bits))

    def address(self) -> Expression:
        """`&(place)`: place is a variable, or an element of something that a pointer points at."""
        self.take("(")
        base = self.primary()
        if self.peek() != "[":
            self.take(")")
            return base
        self.take()
        index = self.conditional()
        self.take("]")
        self.take(")")
        size = base.pointee

        def evaluate(thread: Any) -> Value:
            start = base.evaluate(thread)
            return start if isinstance(start, str) else start + size * _known(index.evaluate(thread))

        return Expression("", evaluate, size)

    def postfix(self, base: Expression) -> Expression:
        while self.peek() in ("[", "."):
            if self.take() == ".":
                half = 32 * ("x", "y").index(self.take())
                base = Expression("", _field(base, half))
                continue
            index = self.conditional()
            self.take("]")
            base = Expression("", _element(base, index))
        return base

    def primary(self) -> Expression:
        token = self.take()
        if token[:1].isdigit():
            number = int(token.removesuffix("ULL"))
            return Expression("", lambda thread: number)
        if token == "(":
            inner = self.conditional()
            self.take(")")
            return inner
        if not re.match(r"[A-Za-z_]", token):
            raise SourceError(f"cannot read {self.text!r} at {token!r}")
        if token == "reinterpret_cast" or self.peek() == "(":
            return self.call(token)
        if token in self.scope.arrays:
            return Expression("", lambda thread: token, TYPE_BYTES[self.scope.arrays[token]])
        if token in self.scope.maps:
            return Expression("", lambda thread: token)
        return Expression("", lambda thread: thread.variable(token), self.scope.pointers.get(token, 0))

    def call(self, name: str) -> Expression:
        if name == "reinterpret_cast":  # of a pointer, to the integer that it is
            for expected in ("<", "", ">"):
                self.take(expected)
            return self.primary()
        self.take("(")
        arguments = []
        while self.peek() != ")":
            arguments.append(self.conditional())
            if self.peek() == ",":
                self.take()
        self.take(")")
        if name == "__shfl_sync":  # broadcast of a value that the warp agrees on
            return arguments[1]
        if name == "clock64":  # the random sleeps of a stress build
            return Expression("", lambda thread: None)
        if name in ("min", "max"):
            return _combine({"min": min, "max": max}[name], *arguments)
        if name == "make_uint2":
            low, high = arguments
            return Expression(
                "", lambda thread: _known(low.evaluate(thread)) & 0xFFFFFFFF | _known(high.evaluate(thread)) << 32
            )
        helper = self.scope.helpers.get(name)
        if helper is None or helper.kind not in VALUE_HELPERS:
            raise SourceError(f"unknown function {name} in {self.text!r}")
        return _value_of(helper.kind, arguments)


def _value_of(kind: str, arguments: list[Expression]) -> Expression:
    if kind == "same":
        return arguments[0]
    if kind == "pointer_offset":
        base, offset = arguments
        return Expression(
            "", lambda thread: base.evaluate(thread) + base.pointee * _known(offset.evaluate(thread)), base.pointee
        )
    if kind == "tmem_address":
        base, row, col = arguments
        return Expression(
            "",
            lambda thread: base.evaluate(thread) + (_known(row.evaluate(thread)) << 16) + _known(col.evaluate(thread)),
        )
    return Expression("", lambda thread: thread.builtin(kind))


def _known(value: Value) -> int:
    if not isinstance(value, int):
        raise SourceError(f"needs the value of {value or 'data that is not followed'}")
    return value


def _wrap(value: Value, name: str, bits: int) -> Value:
    if not isinstance(value, int):
        return value
    if name == "bool":
        return int(value != 0)
    value &= (1 << bits) - 1
    return value - (1 << bits) if name.startswith("int") and value >> (bits - 1) else value


def _combine(operation: Callable[[int, int], int], left: Expression, right: Expression) -> Expression:
    one, two = left.evaluate, right.evaluate

    def evaluate(thread: Any) -> Value:
        a, b = one(thread), two(thread)
        if type(a) is not int or type(b) is not int:
            a, b = _known(a), _known(b)
        return operation(a, b)

    return Expression("", evaluate)


def _field(base: Expression, shift: int) -> Evaluate:
    return lambda thread: _known(base.evaluate(thread)) >> shift & 0xFFFFFFFF


def _element(base: Expression, index: Expression) -> Evaluate:
    size = base.pointee

    def evaluate(thread: Any) -> Value:
        return thread.element(base.evaluate(thread), _known(index.evaluate(thread)), size)

    return evaluate
