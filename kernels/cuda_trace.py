"""What each thread of a generated kernel does: its instructions in order, with their addresses, counts and masks.

Warp-specialised code branches on the thread, never on data, so a thread can be followed without a GPU: the control
variables (stage, phase, tile) are integers that the source computes. Threads that take the same branches are followed
once. Two things are not taken from the source: the persistent loop runs a fixed number of tiles, so that a finding does
not depend on how many tiles a shape leaves for a cluster, and a long K loop skips whole double laps of the ring, after
which stage and phase stand where they stood.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kernels.cuda_expressions import Expression, SourceError, Value
from kernels.cuda_instructions import UNKNOWN, Helper

if TYPE_CHECKING:
    from kernels.cuda_source import Kernel, Statement

# CTA r of the cluster sees its own shared memory at 0 and that of CTA c through a window at (c + 1) * CLUSTER_WINDOW.
CLUSTER_WINDOW = 1 << 24
_THREAD_NAMES = frozenset({"threadIdx.x", "warp_id_in_cta"})
_THREAD_HELPERS = frozenset({"elect", "thread_rank"})
_RANK_HELPERS = frozenset({"cta_rank", "cta_rank_y"})
# What an answer of cluster launch control says is data: the persistent loop runs on whatever it is.
_IGNORED = frozenset({"prefetch", "sleep", "shift", "answer_decode"})
# Parameters whose values the rules use; the others (data registers, coordinates) are not followed.
_FOLLOWED = frozenset(
    {"addr", "count", "barrier", "phase", "tx_count", "dst_mem", "tmap", "mbar", "cta_mask", "mask", "src_mem", "p",
     "name_bar_id", "src_size", "pred", "dst", "ncols", "taddr", "d_tmem", "enable_input_d", "a_desc", "b_desc"}
)  # fmt: skip
# Operands without which the rules cannot judge an instruction.
_NEEDED: dict[str, tuple[str, ...]] = {
    "mbarrier_init": ("addr", "count"),
    "mbarrier_wait": ("barrier", "phase"),
    "expect_tx": ("addr", "tx_count"),
    "arrive": ("addr",),
    "tma_load": ("dst_mem", "tmap", "mbar"),
    "tma_store": ("tmap", "src_mem"),
    "remote_write": ("addr", "mbar"),
    "shared_read": ("addr",),
    "part_write": ("addr",),
    "part_read": ("addr",),
    "count_read": ("addr",),
    "count_up": ("addr",),
    "count_reset": ("addr",),
    "answer_read": ("addr",),
    "try_cancel": ("addr", "mbar"),
    "row_copy": ("dst_mem", "src_mem", "src_size", "pred"),
    "named_barrier": ("name_bar_id",),
    "wgmma": ("a_desc", "b_desc"),
    "tcgen05_mma": ("d_tmem", "a_desc", "b_desc", "enable_input_d"),
    "tcgen05_commit": ("mbar",),
    "tcgen05_ld": ("taddr",),
    "tmem_alloc": ("dst", "ncols"),
    "tmem_dealloc": ("taddr", "ncols"),
}
_RING_WORK = frozenset({"mbarrier_wait", "tma_load", "row_copy", "wgmma", "tcgen05_mma"})
MAX_EVENTS = 200_000


@dataclass(frozen=True, slots=True)
class Event:
    """One instruction that a thread executes.

    kind: what it does (kernels.cuda_source)
    line: in the generated source
    text: PTX mnemonic, for people
    values: the followed operands by name
    n: number of a wait_group, or -1
    registers: register arrays among the operands
    """

    kind: str
    line: int
    text: str
    values: dict[str, Value]
    n: int = -1
    registers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """Threads of one CTA that do the same.

    rank: CTA within the cluster
    threads: their indices, the followed one first
    events: in program order
    """

    rank: int
    threads: tuple[int, ...]
    events: tuple[Event, ...]

    @property
    def warpgroup(self) -> int:
        return self.threads[0] // 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Walk:
    """How far a thread is followed.

    tiles: tiles of the persistent loop of a consumer
    k_blocks: trip count of a K loop; the least one where CTAs of a cluster differ by one
    lap: K blocks after which the ring's stage and phase repeat
    kept: K blocks that are followed before whole laps are skipped
    uneven: whether some CTAs of a cluster have one K block more
    turns: consumers that take turns with whole tiles, all of which the producer fetches
    pieces: whether tiles differ in how many blocks of K are computed of them
    cluster: number of the cluster that is followed
    votes: what the threads of a warpgroup learn from one another, in turn and over again (stream-K: whether all other
        parts of a tile have arrived, which is data)
    """

    tiles: int
    k_blocks: int
    lap: int
    kept: int
    uneven: bool = False
    turns: int = 1
    pieces: bool = False
    cluster: int = 0
    votes: tuple[int, ...] = (0,)

    def trips(self, count: int, *, fetches: bool) -> int:
        """Iterations to follow of a loop of `count`. The consumer peels one iteration of its K loop off."""
        if self.pieces:
            return count - max(0, (count + (not fetches) - self.kept) // self.lap) * self.lap
        most = self.k_blocks + self.uneven
        if not self.k_blocks - 1 <= count <= most or self.k_blocks <= self.kept:
            return count
        return count - (self.k_blocks - self.kept) // self.lap * self.lap


def traces(
    kernel: Kernel, *, threads: int, ranks: int, walk: Walk, parameters: dict[str, int] | None = None
) -> tuple[Trace, ...]:
    """Every thread of every CTA of a cluster, grouped by what it does. Raises SourceError.

    parameters: values of the kernel's parameters that are no tensor maps
    """
    conditions = _thread_conditions(kernel)
    found = []
    for rank in range(ranks):
        groups: dict[tuple[int, ...], list[int]] = {}
        for index in range(threads):
            probe = _Thread(kernel, index, rank, ranks, walk, dict(parameters or {}))
            # Warps may take the same branches and still use different barriers; the first lane stands for its warp.
            owner = index // 32 if index % 32 == 0 else -1 - index // 128
            groups.setdefault((owner, *(int(bool(c.evaluate(probe))) for c in conditions)), []).append(index)
        for members in groups.values():
            thread = _Thread(kernel, members[0], rank, ranks, walk, dict(parameters or {}))
            thread.run(kernel.body)
            found.append(Trace(rank, tuple(members), tuple(thread.events)))
    return tuple(found)


def _statements(body: list[Statement]) -> list[Statement]:
    return [s for one in body for s in (one, *_statements(one.body), *_statements(one.orelse))]


def _turns_ring(loop: Statement) -> bool:
    if loop.turns_ring is None:
        kinds = {s.helper.kind for s in _statements(loop.body) if s.helper is not None}
        loop.turns_ring = not kinds.isdisjoint(_RING_WORK)
    return loop.turns_ring


def _fetches(loop: Statement) -> bool:
    return any(s.helper is not None and s.helper.kind in ("tma_load", "row_copy") for s in _statements(loop.body))


def _thread_conditions(kernel: Kernel) -> list[Expression]:
    """Branch conditions that differ between the threads of a CTA.

    Raises SourceError for one that also depends on state.
    """
    helpers = kernel.scope.helpers
    sources = _THREAD_NAMES | {name for name, helper in helpers.items() if helper.kind in _THREAD_HELPERS}
    plain = (
        sources | {name for name, helper in helpers.items() if helper.kind in _RANK_HELPERS} | {"int", "uint", "bool"}
    )
    everything = _statements(kernel.body)
    varying = set(sources)
    size = 0
    while len(varying) > size:
        size = len(varying)
        varying |= {s.target for s in everything if s.kind == "assign" and s.value and _names(s.value) & varying}
    found: dict[str, Expression] = {}
    for statement in everything:
        if statement.kind not in ("if", "for", "tiles"):
            continue
        assert statement.value is not None
        names = _names(statement.value)
        if not names & varying:
            continue
        if statement.kind != "if" or not names <= plain:
            raise SourceError(f"a branch mixes thread and state: {statement.value.text}", statement.line)
        found[statement.value.text] = statement.value
    return list(found.values())


def _names(expression: Expression) -> set[str]:
    return set(re.findall(r"threadIdx\.x|[A-Za-z_]\w*", expression.text))


@dataclass(slots=True)
class _Thread:
    """Variables and position of one thread."""

    kernel: Kernel
    index: int
    rank: int
    ranks: int
    walk: Walk
    variables: dict[Any, Value] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    line: int = 0
    voted: int = 0

    # ------------------------------------------------------------ what expressions ask for

    def variable(self, name: str) -> Value:
        if name == "threadIdx.x":
            return self.index
        if name == "warp_id_in_cta":
            return self.index // 32
        if name == "blockIdx.x":
            return self.walk.cluster * self.ranks + self.rank
        if name not in self.variables:
            raise SourceError(f"{name} is read before it is set")
        return self.variables[name]

    def builtin(self, kind: str) -> int:
        return {
            "elect": int(self.index % 32 == 0),
            "thread_rank": self.index,
            "cta_rank": self.rank,
            "cta_rank_y": 0,
        }[kind]

    def element(self, base: Value, index: int, size: int) -> Value:
        """`base[index]`: of a register array, or a word of shared memory."""
        if isinstance(base, str):
            return self.variables.get((base, index))
        self.emit("shared_read", "ld.shared", {"addr": base + size * index})
        return 0

    # ------------------------------------------------------------ statements

    def run(self, body: list[Statement]) -> None:
        for statement in body:
            self.line = statement.line
            try:
                self.step(statement)
            except SourceError as error:
                raise SourceError(str(error), error.line or statement.line) from None

    def step(self, statement: Statement) -> None:
        if statement.kind == "call":
            self.call(statement)
            return
        assert statement.value is not None
        if statement.kind == "assign":
            self.assign(statement, statement.value)
        elif statement.kind == "if":
            value = statement.value.evaluate(self)
            if not isinstance(value, int):
                raise SourceError(f"a branch on data: {statement.value.text}")
            self.run(statement.body if value else statement.orelse)
        elif statement.kind == "for":
            count = statement.value.evaluate(self)
            for number in range(self.trips(statement, count)):
                self.variables[statement.target] = number
                self.run(statement.body)
        elif statement.kind == "tiles":
            for _tile in range(self.walk.tiles * (self.walk.turns if _fetches(statement) else 1)):
                self.run(statement.body)
        else:
            statement.value.evaluate(self)

    def trips(self, loop: Statement, count: int) -> int:
        """A copy loop of the epilogue may have as many iterations as a K loop, and must run in full."""
        if not _turns_ring(loop):
            return count
        return self.walk.trips(count, fetches=not self.walk.pieces or _fetches(loop))

    def assign(self, statement: Statement, value: Expression) -> None:
        floats = self.float_arrays(value.text)
        if floats:
            self.emit("register_read", "mov", {}, registers=floats)
            if self.kernel.scope.arrays.get(statement.target) == "float":
                return  # sums of accumulators are data, which is not followed
        if statement.index is None:
            self.variables[statement.target] = value.evaluate(self)
        elif statement.target in self.kernel.scope.arrays:
            self.variables[statement.target, statement.index.evaluate(self)] = value.evaluate(self)
        else:
            raise SourceError(f"assigns to memory: {statement.target}[{statement.index.text}]")

    def float_arrays(self, text: str) -> tuple[str, ...]:
        return self.kernel.scope.floats_in(text)

    def call(self, statement: Statement) -> None:
        helper = statement.helper
        assert helper is not None
        if helper.kind in _IGNORED:
            return
        if helper.kind == "mapa":
            self.map_address(dict(zip(helper.parameters, statement.arguments, strict=True)))
            return
        if helper.kind == "vote":
            self.vote(helper, dict(zip(helper.parameters, statement.arguments, strict=True)))
            return
        if helper.kind == "encode_descriptor":
            self.encode_descriptor(dict(zip(helper.parameters, statement.arguments, strict=True)))
            return
        if helper.kind == "cluster_sync":
            self.emit("cluster_arrive", "barrier.cluster.arrive.aligned", {})
            self.emit("cluster_wait", "barrier.cluster.wait.aligned", {})
            return
        if statement.followed is None:
            self.prepare(statement, helper)
        assert statement.followed is not None
        values = {name: evaluate(self) for name, evaluate in statement.followed}
        if None in values.values():
            raise SourceError(f"an operand of {helper.text} is data: {values}")
        self.emit(helper.kind, helper.text, values, helper.immediate, statement.registers)
        if helper.kind in ("count_read", "count_up"):
            self.variables[self.element_of(statement.arguments[0])] = None

    def prepare(self, statement: Statement, helper: Helper) -> None:
        """Choose, once for all threads, which operands of an instruction to follow."""
        named = dict(zip(helper.parameters, statement.arguments, strict=False))
        if helper.kind in ("convert", "remote_write", "shared_read", "part_write"):
            statement.registers = self.float_arrays(" ".join(statement.arguments))
        elif helper.kind in ("wgmma", "tcgen05_ld"):
            statement.registers = self.float_arrays(statement.arguments[0])
        if helper.kind == "shared_write" and not {"p", "addr"} & set(named):
            raise SourceError(f"{helper.text} has no address")
        if missing := set(_NEEDED.get(helper.kind, ())) - set(named):
            raise SourceError(f"{helper.text} has no operand {sorted(missing)[0]}")
        follow = named if helper.kind not in ("convert", "shift", "global_write", UNKNOWN) else {}
        expression = self.kernel.scope.expression
        statement.followed = tuple((k, expression(v).evaluate) for k, v in follow.items() if k in _FOLLOWED)

    def map_address(self, named: dict[str, str]) -> None:
        """mapa: where the CTA of a given rank sees this address."""
        address, rank = (self.kernel.scope.expression(named[name]).evaluate(self) for name in ("a", "b"))
        self.variables[self.element_of(named["d"])] = (rank + 1) * CLUSTER_WINDOW + address

    def vote(self, helper: Helper, named: dict[str, str]) -> None:
        """A named barrier at which threads learn something."""
        found = self.walk.votes[self.voted % len(self.walk.votes)]
        self.voted += 1
        self.variables[self.element_of(named["d"])] = found
        barrier = self.kernel.scope.expression(named["a"]).evaluate(self)
        try:
            ayes = self.kernel.scope.expression(named["c"]).evaluate(self)
        except SourceError:  # as it should be: what the counter says is not followed
            ayes = None
        self.emit("named_barrier", helper.text, {"name_bar_id": barrier, "vote": found, "ayes": ayes})

    def encode_descriptor(self, named: dict[str, str]) -> None:
        """The start address is the part of a shared-memory descriptor that the rules use."""
        address = self.kernel.scope.expression(named["addr"]).evaluate(self)
        place = re.fullmatch(r"\(&\((.+)\)\)", named["desc"])
        if place is None:
            raise SourceError(f"cannot read the descriptor {named['desc']!r}")
        self.variables[self.element_of(place[1])] = (address & 0x3FFFF) >> 4

    def element_of(self, text: str) -> tuple[str, int]:
        place = re.fullmatch(r"(\w+)\[(\d+)\]", text)
        if place is None or place[1] not in self.kernel.scope.arrays:
            raise SourceError(f"cannot read the destination {text!r}")
        return place[1], int(place[2])

    def emit(
        self, kind: str, text: str, values: dict[str, Value], n: int = -1, registers: tuple[str, ...] = ()
    ) -> None:
        if len(self.events) >= MAX_EVENTS:
            raise SourceError(f"a thread executes more than {MAX_EVENTS} instructions")
        self.events.append(Event(kind, self.line, text, values, n, registers))
