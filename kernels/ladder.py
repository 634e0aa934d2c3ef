"""The ladder: one product computed by ever better kernels, from synchronous loads to the templates' clusters.

Steps 1, 3 and 4 are simple kernels of one warpgroup and one tile of 128 x 128 for each CTA, kept for comparison; steps
7, 8 and 9 are presets of the templates. The numbers follow a published tutorial, whose own figures for a B200 at
4096^3 fp16 stand beside ours; its steps 2, 5 and 6 have no published time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kernels.arch import SM_90A, SM_100A, Arch
from kernels.config import GemmConfig
from kernels.errors import ConfigError
from kernels.problem import ELEMENT_BYTES

if TYPE_CHECKING:
    from kernels.problem import GemmProblem

TILE_ROWS, TILE_COLUMNS, TILE_K = 128, 128, 64
SIMPLE_STEPS = {
    1: "synchronous load + MMA",
    3: "spatial tiling, K accumulated by the tensor core",
    4: "TMA load and store",
}
PUBLISHED_SOURCE = (
    "fangpin, gpu-hpc-book, chapter 11 (2026-08): B200, 4096x4096x4096 fp16, locked clocks, 1000 launches"
)
LIBRARY = "library"
# That table: milliseconds, and the speed-up over step 1 as it is printed there.
PUBLISHED: dict[str, tuple[float, float]] = {
    "step1": (70.0, 1.0),
    "step3": (53.6, 1.3),
    "step4": (0.49, 142.0),
    "step7": (0.23, 309.0),
    "step8": (0.104, 676.0),
    "step9": (0.094, 744.0),
    LIBRARY: (0.094, 744.0),
}
PUBLISHED_SHAPE, PUBLISHED_DTYPE, PUBLISHED_ARCH = "4096x4096x4096", "fp16", "sm_100a"


@dataclass(frozen=True, kw_only=True)
class StepConfig(GemmConfig):
    """A simple kernel: one warpgroup computes one tile, one block of K after the other, without overlap.

    step: 1, 3 or 4, see SIMPLE_STEPS
    The other knobs say what the kernel does and cannot be chosen.
    """

    pipe_depth: int = 1
    cta_group: int = 1
    num_consumers: int = 1
    blk_m: int = TILE_ROWS
    blk_n: int = TILE_COLUMNS
    blk_k: int = TILE_K
    l2_group_size: int = 1
    epi_n: int = TILE_COLUMNS
    epi_stages: int = 1
    step: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step not in SIMPLE_STEPS:
            raise ConfigError(f"step = {self.step}: the simple kernels are steps 1, 3 and 4", knob="step")
        fixed = type(self).__dataclass_fields__
        if other := [name for name in self.knobs() if name != "step" and getattr(self, name) != fixed[name].default]:
            raise ConfigError(f"{other[0]} of a simple kernel cannot be chosen", knob=other[0])

    @property
    def cluster_tile(self) -> tuple[int, int]:
        """One CTA, one tile."""
        return TILE_ROWS, TILE_COLUMNS

    @property
    def threads(self) -> int:
        """One warpgroup does everything in turn."""
        return 128

    @property
    def epilogue_bytes(self) -> int:
        """Step 4 stages its tile for the TMA store, the others write D from registers."""
        return ELEMENT_BYTES * TILE_ROWS * TILE_COLUMNS if self.step == 4 else 0

    def clusters(self, problem: GemmProblem, sm_count: int) -> int:
        """One CTA for each tile, however many SMs there are."""
        tiles_m, tiles_n = self.cluster_tiles(problem)
        return tiles_m * tiles_n


@dataclass(frozen=True, kw_only=True)
class Sm90StepConfig(StepConfig):
    """A simple kernel on Hopper: the accumulators lie in registers."""

    arch: ClassVar[Arch] = SM_90A


@dataclass(frozen=True, kw_only=True)
class Sm100StepConfig(StepConfig):
    """A simple kernel on Blackwell: the accumulators lie in tensor memory."""

    arch: ClassVar[Arch] = SM_100A


STEP_CONFIGS: dict[str, type[StepConfig]] = {"sm_90a": Sm90StepConfig, "sm_100a": Sm100StepConfig}


def step_violation(problem: GemmProblem) -> str | None:
    """Why the simple kernels cannot serve this problem, or None: they know whole tiles only."""
    for name, extent, whole in (("m", problem.m, TILE_ROWS), ("n", problem.n, TILE_COLUMNS), ("k", problem.k, TILE_K)):
        if extent % whole:
            return f"{name} = {extent} is not a multiple of {whole}: the simple kernels of the ladder take whole tiles"
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """One kernel of the ladder.

    name: step1 ... step9
    mechanism: what it adds
    config: what is built
    """

    name: str
    mechanism: str
    config: GemmConfig


def simple_rungs(arch: str) -> tuple[Rung, ...]:
    """The rungs below the template of an architecture, slowest first."""
    return tuple(
        Rung(name=f"step{step}", mechanism=mechanism, config=STEP_CONFIGS[arch](step=step))
        for step, mechanism in SIMPLE_STEPS.items()
    )


def as_published(problem: GemmProblem, arch: str) -> bool:
    """Whether a time of this problem may stand beside the published ones."""
    return (problem.shape, problem.dtype.value, arch) == (PUBLISHED_SHAPE, PUBLISHED_DTYPE, PUBLISHED_ARCH)
