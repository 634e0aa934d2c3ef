"""What the structural rules know of a kernel as a whole, and the shape of a rule that follows one thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kernels.config import Sm90GemmConfig, Sm100GemmConfig
from kernels.cuda_trace import CLUSTER_WINDOW
from kernels.problem import ELEMENT_BYTES
from kernels.resources import resources_of

if TYPE_CHECKING:
    from kernels.config import GemmConfig
    from kernels.cuda_trace import Event, Trace, Walk
    from kernels.launch import TensorMapPlan


Report = Callable[[str, int, str], None]
# A ring's waiting side that asks for "empty" starts one phase ahead, so that its first lap passes.
STARTS_AHEAD = frozenset({"mma2tma", "ld2mma", "sum2parts", "roles2next"})
PART_BYTES = 16  # of one st.async: four float32
ANSWER_BYTES = 16  # of one clusterlaunchcontrol.try_cancel
BARRIER_OPERAND = {
    "mbarrier_wait": "barrier", "arrive": "addr", "expect_tx": "addr", "tma_load": "mbar", "tcgen05_commit": "mbar",
    "remote_write": "mbar", "try_cancel": "mbar",
}  # fmt: skip


def leader_of(config: GemmConfig, rank: int) -> int:
    """The CTA whose threads issue the MMAs of CTA `rank`: on Blackwell the first of a pair, else itself."""
    return 0 if isinstance(config, Sm100GemmConfig) and config.cta_group > 1 else rank


@dataclass(frozen=True, slots=True)
class Slot:
    """One mbarrier: ring name, slot number, and the CTA whose shared memory holds it."""

    ring: str
    number: int
    rank: int

    def __str__(self) -> str:
        return f"{self.ring}[{self.number}]"


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes [low, high) of one CTA's shared memory that hold one operand of one stage."""

    rank: int
    operand: str
    stage: int
    low: int
    high: int


@dataclass(slots=True)
class Facts:
    """What the checks know of the kernel as a whole.

    walk: how far threads were followed
    maps: tensor maps by kernel parameter
    barriers: ring and slot number by shared-memory address
    bases: addresses in global memory that pointers are given
    regions: where stages lie, learned from the loads
    answers: slot of each answer of cluster launch control by its address, learned from the requests
    first_tail: where the tails of cp_async begin, behind all else in shared memory
    """

    config: GemmConfig
    walk: Walk
    maps: dict[str, TensorMapPlan]
    barriers: dict[int, tuple[str, int]]
    bases: dict[str, int] = field(default_factory=dict)
    regions: list[Region] = field(default_factory=list)
    answers: dict[int, int] = field(default_factory=dict)
    first_tail: int = field(init=False)

    def __post_init__(self) -> None:
        tails = self.config.tail_bytes if isinstance(self.config, Sm90GemmConfig) else 0
        self.first_tail = resources_of(self.config).smem_bytes - self.config.pipe_depth * tails

    def slot(self, event: Event, rank: int) -> Slot | None:
        """The mbarrier that an instruction of CTA `rank` uses, or None where it uses none that was initialised."""
        operand = BARRIER_OPERAND.get(event.kind)
        if operand is None:
            return None
        window, address = divmod(int(event.values[operand]), CLUSTER_WINDOW)
        found = self.barriers.get(address)
        return Slot(*found, window - 1 if window else rank) if found else None

    def operand_at(self, address: int) -> str:
        """The operand whose pointer was given the next lower address, or the one below 16 bytes above it."""
        return max((base, name) for name, base in self.bases.items() if base - PART_BYTES < address)[1]

    def box_bytes(self, event: Event) -> int:
        """Bytes of one TMA copy."""
        elements = 1
        for extent in self.maps[event.values["tmap"]].box:
            elements *= extent
        return elements * ELEMENT_BYTES

    def region(self, rank: int, operand: str, address: int) -> Region | None:
        return next(
            (r for r in self.regions if r.rank == rank and r.operand == operand and r.low <= address < r.high), None
        )


class Check:
    """Base: sees every instruction of one thread in order, then its end."""

    def __init__(self, facts: Facts, trace: Trace, report: Report) -> None:
        self.facts, self.trace, self.report = facts, trace, report
        self.config = facts.config

    def see(self, event: Event, slot: Slot | None) -> None:
        raise NotImplementedError

    def end(self, line: int) -> None:
        """`line` is that of the thread's last instruction."""
