"""Reader of the CUDA C++ that TVM generates: helper functions, and the kernel's body as a tree of statements.

TVM writes one statement a line, and every PTX instruction as a call of a helper whose body holds the `asm` text. The
reader takes the instruction from that text, not from the helper's name. It knows only the forms that TVM emits and
raises SourceError for any other, so that nothing is skipped unread.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from kernels.cuda_expressions import TYPE_BYTES, Evaluate, Expression, Scope, SourceError
from kernels.cuda_instructions import UNKNOWN, Helper, read_helpers

_TYPE = r"(?:unsigned long long|" + "|".join(name for name in TYPE_BYTES if " " not in name) + r")"


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

    parameters: names in order: of tensor maps, of pointers and of integers
    body: top-level statements
    """

    parameters: tuple[str, ...]
    body: list[Statement]
    scope: Scope


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
    parts = [part.split() for part in head[1].split(",") if part.strip()]
    parameters = tuple(words[-1] for words in parts)
    maps = frozenset(words[-1] for words in parts if "CUtensorMap" in words)
    pointers = {words[-1]: TYPE_BYTES[words[0].rstrip("*")] for words in parts if words[0].endswith("*")}
    scope = Scope(helpers=read_helpers(source), maps=maps, pointers=pointers)
    lines = source.split("\n")
    first = source.count("\n", 0, head.end()) + 1
    end = next((i for i in range(first, len(lines)) if lines[i] == "}"), None)
    if end is None:
        raise SourceError(f"kernel {symbol} has no end", first)
    reader = _BodyReader(scope, lines, first, end)
    return Kernel(parameters=parameters, body=reader.block(), scope=scope)


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
                self.scope.pointers[match[3]] = TYPE_BYTES[match[1]]
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
