"""Reader of the CUDA C++ that TVM generates: helper functions, and the kernel's body as a tree of statements.

TVM writes one statement a line, and every PTX instruction as a call of a helper whose body holds the `asm` text. The
reader takes the instruction from that text, not from the helper's name. It knows only the forms that TVM emits and
raises SourceError for any other, so that nothing is skipped unread.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# A value is an integer, a tensor map or register array by name, or None: data that this reader does not follow.
Value = Any
Evaluate = Callable[[Any], Value]

# CTA r of the cluster sees its own shared memory at 0 and that of CTA c through a window at (c + 1) * CLUSTER_WINDOW.
CLUSTER_WINDOW = 1 << 24

_TYPE_BYTES = {
    "void": 1, "bool": 1, "uchar": 1, "ushort": 2, "half": 2, "nv_bfloat16": 2, "int": 4, "uint": 4, "float": 4,
    "int64_t": 8, "uint64_t": 8, "unsigned long long": 8, "uint2": 8,
}  # fmt: skip
_TYPE = r"(?:unsigned long long|" + "|".join(name for name in _TYPE_BYTES if " " not in name) + r")"

# What a helper does, by the text of its body. The first match counts.
_INSTRUCTIONS: tuple[tuple[str, str], ...] = (
    (r"mbarrier\.init\.", "mbarrier_init"),
    (r"mbarrier\.try_wait\.parity\.", "mbarrier_wait"),
    (r"mbarrier\.arrive\.expect_tx\.", "expect_tx"),
    (r"mbarrier\.arrive\.", "arrive"),
    (r"cp\.async\.bulk\.tensor\.\dd\.shared::cluster\.global\.", "tma_load"),
    (r"cp\.async\.bulk\.tensor\.\dd\.global\.shared::cta\.", "tma_store"),
    (r"cp\.async\.bulk\.commit_group;", "bulk_commit"),
    (r"cp\.async\.bulk\.wait_group\.read (?P<n>\d+);", "bulk_wait_read"),
    (r"cp\.async\.bulk\.wait_group (?P<n>\d+);", "bulk_wait"),
    (r"wgmma\.fence\.", "wgmma_fence"),
    (r"wgmma\.mma_async\.", "wgmma"),
    (r"wgmma\.commit_group\.", "wgmma_commit"),
    (r"wgmma\.wait_group\.sync\.aligned (?P<n>\d+);", "wgmma_wait"),
    (r"tcgen05\.alloc\.", "tmem_alloc"),
    (r"tcgen05\.dealloc\.", "tmem_dealloc"),
    (r"tcgen05\.relinquish_alloc_permit\.", "tmem_relinquish"),
    (r"tcgen05\.mma\.", "tcgen05_mma"),
    (r"tcgen05\.commit\.", "tcgen05_commit"),
    (r"tcgen05\.ld\.", "tcgen05_ld"),
    (r"tcgen05\.wait::ld\.", "tcgen05_wait_ld"),
    (r"tcgen05\.fence::after_thread_sync;", "fence_after_sync"),
    (r"tcgen05\.fence::before_thread_sync;", "fence_before_sync"),
    (r"stmatrix\.|st\.shared(?:::cta)?\.", "shared_write"),
    (r"st\.async\.", "remote_write"),
    (r"ld\.shared\.", "shared_read"),
    (r"st\.global\.", "global_write"),
    (r"movmatrix\.", "lane_transpose"),
    (r"cvt\.rn\.\w+\.f32", "convert"),
    (r"fence\.proxy\.async\.shared::cta;", "proxy_fence"),
    (r"fence\.mbarrier_init\.release\.cluster;", "init_fence"),
    (r"bar\.sync %0, 128;", "named_barrier"),
    (
        r"barrier\.cluster\.arrive(?:\.release)?\.aligned;.*barrier\.cluster\.wait(?:\.acquire)?\.aligned;",
        "cluster_sync",
    ),
    (r"barrier\.cluster\.arrive\.release\.aligned;", "cluster_arrive"),
    (r"barrier\.cluster\.wait\.acquire\.aligned;", "cluster_wait"),
    (r"setmaxnreg\.", "setmaxnreg"),
    (r"prefetch\.tensormap", "prefetch"),
    (r"mapa\.", "mapa"),
)
# Helpers without an instruction of their own, by the code of their body.
_PLAIN_HELPERS: tuple[tuple[str, str], ...] = (
    (r"elect_one_sync\(\)|elect\.sync", "elect"),
    (r"thread_rank\(\)", "thread_rank"),
    (r"%%cluster_ctarank|%%cluster_ctaid\.x", "cta_rank"),
    (r"%%cluster_ctaid\.y", "cta_rank_y"),
    (r"return __cvta_generic_to_shared\(", "same"),
    (r"return get_tmem_addr\(", "tmem_address"),
    (r"SmemDescriptor _desc", "encode_descriptor"),
    (r"return ptr \+ offset;", "pointer_offset"),
    (r"__syncthreads\(\)", "cta_barrier"),
    (r"__syncwarp\(\)", "warp_barrier"),
    (r"__nanosleep\(", "sleep"),
    (r"__float22bfloat162_rn|__float22half2_rn", "convert"),
)
VALUE_HELPERS = frozenset({"elect", "thread_rank", "cta_rank", "cta_rank_y", "same", "tmem_address", "pointer_offset"})
UNKNOWN = "unknown"


class SourceError(ValueError):
    """A form that the reader does not know. `line` counts from 1 in the generated source."""

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True, slots=True)
class Helper:
    """A device function that the kernel calls.

    kind: what it does, or UNKNOWN
    text: PTX mnemonic, or the helper's name where it has none, for people
    parameters: names in order, without leading underscores
    immediate: the number written into the instruction (of a wait_group), or -1
    """

    kind: str
    text: str
    parameters: tuple[str, ...]
    immediate: int


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
class Statement:
    """One node of the tree. Lines count from 1 in the generated source.

    kind: "assign", "read", "call", "if", "for" or "tiles" (the persistent loop, `while (1)`)
    target: variable or array that is assigned
    index: element of an array, or None
    value: right-hand side, condition or trip count
    followed: operands to evaluate, chosen when the statement is first executed
    registers: register arrays among the operands
    turns_ring: whether a loop goes round the ring of stages, found when it is first executed
    """

    kind: str
    line: int
    target: str = ""
    index: Expression | None = None
    value: Expression | None = None
    helper: Helper | None = None
    arguments: tuple[str, ...] = ()
    followed: tuple[tuple[str, Evaluate], ...] | None = None
    registers: tuple[str, ...] = ()
    turns_ring: bool | None = None
    body: list[Statement] = field(default_factory=list)
    orelse: list[Statement] = field(default_factory=list)


@dataclass(slots=True)
class Kernel:
    """The kernel of one source.

    maps: parameter names in order, of tensor maps and of pointers
    body: top-level statements
    """

    maps: tuple[str, ...]
    body: list[Statement]
    scope: Scope


@dataclass(slots=True)
class Scope:
    """Names that expressions may use.

    helpers: device functions by name
    arrays: register arrays by name, with their element type
    pointers: pointer variables by name, with the bytes of what they point at
    floats: register arrays that hold float32 values
    """

    helpers: dict[str, Helper]
    arrays: dict[str, str] = field(default_factory=dict)
    pointers: dict[str, int] = field(default_factory=dict)
    maps: frozenset[str] = frozenset()
    cache: dict[str, Expression] = field(default_factory=dict)

    def expression(self, text: str) -> Expression:
        """Raises SourceError."""
        found = self.cache.get(text)
        if found is None:
            found = self.cache[text] = _Parser(text, self).whole()
        return found


def read_helpers(source: str) -> dict[str, Helper]:
    """Device functions by name."""
    pattern = r"^__forceinline__ __device__ [\w* ]*?(\w+)\(([^)]*)\) \{(.*?)^\}"
    found = {}
    for name, parameters, body in re.findall(pattern, source, flags=re.MULTILINE | re.DOTALL):
        names = tuple(part.split()[-1].lstrip("*&_") for part in parameters.split(",") if part.strip())
        found[name] = _helper(name, names, body)
    return found


def _helper(name: str, parameters: tuple[str, ...], body: str) -> Helper:
    assembly = " ".join(re.findall(r'"((?:[^"\\]|\\.)*)"', body)) if "asm" in body else ""
    for pattern, kind in _INSTRUCTIONS:
        if match := re.search(pattern, assembly):
            text = re.match(r"[\w.:]+(?: \d+)?", assembly[match.start() :])
            immediate = int(match["n"]) if "n" in match.groupdict() else -1
            return Helper(kind, text[0] if text else name, parameters, immediate)
    kinds = (kind for pattern, kind in _PLAIN_HELPERS if re.search(pattern, body))
    mnemonic = re.search(r"[a-z]\w*(?:\.[\w:]+)+", assembly)
    return Helper(next(kinds, UNKNOWN), mnemonic[0] if mnemonic else name, parameters, -1)


# ---------------------------------------------------------------------------------------------------------- expressions

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+)|(?P<name>(?:threadIdx|blockIdx)\.[xyz]|unsigned long long|[A-Za-z_]\w*)"
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
        if token == "(" and self.tokens[self.at + 1] in _TYPE_BYTES:
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
            return Expression("", inner.evaluate, _TYPE_BYTES[name])
        bits = 8 * _TYPE_BYTES[name]
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
        if token.isdigit():
            number = int(token)
            return Expression("", lambda thread: number)
        if token == "(":
            inner = self.conditional()
            self.take(")")
            return inner
        if not re.match(r"[A-Za-z_]", token):
            raise SourceError(f"cannot read {self.text!r} at {token!r}")
        if self.peek() == "(":
            return self.call(token)
        if token in self.scope.arrays:
            return Expression("", lambda thread: token, _TYPE_BYTES[self.scope.arrays[token]])
        if token in self.scope.maps:
            return Expression("", lambda thread: token)
        return Expression("", lambda thread: thread.variable(token), self.scope.pointers.get(token, 0))

    def call(self, name: str) -> Expression:
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


# ----------------------------------------------------------------------------------------------------------- statements

_CALL = re.compile(r"(\w+)\((.*)\);$", flags=re.DOTALL)
_DECLARED_ARRAY = re.compile(rf"alignas\(64\) ({_TYPE}) (\w+)\[\d+\];$")
_DECLARED = re.compile(rf"({_TYPE})(\*?) (\w+) = (.+);$")
_ASSIGNED = re.compile(r"(\w+)\[(.+?)\] = (.+);$")
_SHARED_POOL = re.compile(r"extern __shared__ __align__\(\d+\) uchar (\w+)\[\];$")
_FOR = re.compile(r"for \(int (\w+) = 0; \1 < (.+); \+\+\1\) \{$")


def split_arguments(text: str) -> tuple[str, ...]:
    """Arguments of a call, split at top-level commas."""
    parts, depth, start = [], 0, 0
    for match in re.finditer(r"[()\[\],]", text):
        mark = match[0]
        if mark == ",":
            if depth == 0:
                parts.append(text[start : match.start()].strip())
                start = match.end()
        else:
            depth += 1 if mark in "([" else -1
    last = text[start:].strip()
    return (*parts, last) if last else tuple(parts)


def read_kernel(source: str, symbol: str) -> Kernel:
    """The tree of one kernel. Raises SourceError with the line."""
    head = re.search(rf'^extern "C" __global__ [^\n;]*\b{symbol}\(([^\n]*)\) \{{$', source, flags=re.MULTILINE)
    if head is None:
        raise SourceError(f"the source has no kernel {symbol}")
    maps = tuple(part.split()[-1] for part in head[1].split(",") if part.strip())
    scope = Scope(helpers=read_helpers(source), maps=frozenset(maps))
    lines = source.split("\n")
    first = source.count("\n", 0, head.end()) + 1
    end = next((i for i in range(first, len(lines)) if lines[i] == "}"), None)
    if end is None:
        raise SourceError(f"kernel {symbol} has no end", first)
    reader = _BodyReader(scope, lines, first, end)
    return Kernel(maps=maps, body=reader.block(), scope=scope)


class _BodyReader:
    """Line by line into statements."""

    def __init__(self, scope: Scope, lines: list[str], first: int, end: int) -> None:
        self.scope, self.lines, self.at, self.end = scope, lines, first, end

    def block(self) -> list[Statement]:
        """Statements up to the brace that closes this block, which stays unread."""
        statements: list[Statement] = []
        while self.at < self.end:
            text = self.lines[self.at].strip()
            if text.startswith("}"):
                break
            self.at += 1
            if not text or text.startswith("#pragma unroll"):
                continue
            try:
                statements.extend(self.statement(text, self.at))
            except SourceError as error:
                raise SourceError(str(error), error.line or self.at) from None
        return statements

    def statement(self, text: str, line: int) -> list[Statement]:  # noqa: PLR0911 (one return for each form)
        if text.endswith("{"):
            return [self.compound(text, line)]
        if match := _SHARED_POOL.match(text):
            self.scope.pointers[match[1]] = 1
            return [Statement("assign", line, target=match[1], value=Expression("0", lambda thread: 0))]
        if match := _DECLARED_ARRAY.match(text):
            self.scope.arrays[match[2]] = match[1]
            return []
        if match := _DECLARED.match(text):
            value = self.scope.expression(match[4])
            if match[2]:
                self.scope.pointers[match[3]] = _TYPE_BYTES[match[1]]
            return [Statement("assign", line, target=match[3], value=value)]
        if match := _ASSIGNED.match(text):
            index, value = self.scope.expression(match[2]), self.scope.expression(match[3])
            return [Statement("assign", line, target=match[1], index=index, value=value)]
        if match := _CALL.match(text):
            if helper := self.scope.helpers.get(match[1]):
                return [Statement("call", line, helper=helper, arguments=split_arguments(match[2]))]
            if match[1] == "__syncthreads":
                return [Statement("call", line, helper=Helper("cta_barrier", "__syncthreads", (), -1))]
            return [Statement("call", line, helper=Helper(UNKNOWN, match[1], (), -1))]
        if text.endswith(";"):
            return [Statement("read", line, value=self.scope.expression(text[:-1]))]
        raise SourceError(f"cannot read the statement {text[:80]!r}")

    def compound(self, text: str, line: int) -> Statement:
        if text == "while (1) {":
            return self.tile_loop(line)
        if match := _FOR.match(text):
            statement = Statement("for", line, target=match[1], value=self.scope.expression(match[2]))
            statement.body = self.closed_block()
        elif text.startswith("if (") and text.endswith(") {"):
            statement = Statement("if", line, value=self.scope.expression(text[4:-3]))
            statement.body = self.closed_block()
            if self.lines[self.at - 1].strip() == "} else {":
                statement.orelse = self.closed_block()
        else:
            raise SourceError(f"cannot read the block {text[:80]!r}")
        return statement

    def closed_block(self) -> list[Statement]:
        statements = self.block()
        if self.at >= self.end:
            raise SourceError("a block has no end")
        self.at += 1
        return statements

    def tile_loop(self, line: int) -> Statement:
        """`while (1)` whose first statement leaves it when no tile is left."""
        leave = re.match(r"if \(!\((.+)\)\) \{ break; \}$", self.lines[self.at].strip())
        if leave is None:
            raise SourceError("a while loop that does not start with its way out", line)
        self.at += 1
        statement = Statement("tiles", line, value=self.scope.expression(leave[1]))
        statement.body = self.closed_block()
        return statement
