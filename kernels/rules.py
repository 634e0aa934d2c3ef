"""Laws of the hardware and of the templates. Each rule returns why it is broken, with the numbers in it, or None.

Rules say what cannot run. What is legal but hopeless is `search_space.checks`' business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from kernels.config import GemmConfig, Sm90GemmConfig, Sm100GemmConfig
from kernels.problem import MAX_EXTENT
from kernels.resources import SM90_OVERHEAD_REGISTERS, resources_of, sm90_entry_registers, sm90_registers
from kernels.stream_k import stream_k_of

if TYPE_CHECKING:
    from kernels.arch import Arch
    from kernels.problem import GemmProblem

Rule = Callable[[GemmConfig], "str | None"]

MAX_TMA_BOX_ROWS = 256
MAX_PIPE_DEPTH = 16
MAX_SPLIT_K = 16  # CTAs of one cluster (above 8 the launch asks for a non-portable size)
MAX_COORDINATE = MAX_EXTENT - 2048  # no tile of a cluster has more rows or columns
EXPECT_TX_LIMIT = 1 << 20  # the transaction count of an mbarrier is 20 bits wide


def problem_violation(problem: GemmProblem, arch: Arch) -> str | None:
    """Why no config of this architecture can serve the problem, or None."""
    for name in ("m", "n", "k"):
        if getattr(problem, name) > MAX_COORDINATE:
            return (
                f"{name} = {getattr(problem, name)}: coordinates are 32-bit, also those of a last tile that lies "
                f"partly outside: at most {MAX_COORDINATE}"
            )
    if arch.name == "sm_90a":  # it has loads and stores without TMA
        return None
    for name, extent, operands in (("k", problem.k, "A and B"), ("n", problem.n, "D")):
        if extent % 8:
            return (
                f"{name} = {extent} is not a multiple of 8: TMA needs 16-byte row strides for {operands}; "
                f"pad {name} to {(extent + 7) // 8 * 8}"
            )
    return None


def _member(config: GemmConfig, knob: str, allowed: Iterable[int]) -> str | None:
    value = getattr(config, knob)
    choices = tuple(allowed)
    if value in choices:
        return None
    return f"{knob} = {value}: {config.arch.name} takes {', '.join(map(str, choices))}"


def _smem(config: GemmConfig) -> str | None:
    need, limit = resources_of(config).smem_bytes, config.arch.smem_bytes
    if need <= limit:
        return None
    return (
        f"needs {need} B of shared memory ({config.pipe_depth} stages of {config.stage_bytes} B, "
        f"{config.epilogue_bytes} B epilogue), {config.arch.name} has {limit} B"
    )


def _expect_tx(config: GemmConfig) -> str | None:
    total = config.stage_bytes * (config.cta_group if isinstance(config, Sm100GemmConfig) else 1)
    if total < EXPECT_TX_LIMIT:
        return None
    return f"one stage brings {total} B to one barrier, an mbarrier counts fewer than {EXPECT_TX_LIMIT} B"


def _pipe_depth(config: GemmConfig) -> str | None:
    if config.pipe_depth <= MAX_PIPE_DEPTH:
        return None
    return f"pipe_depth = {config.pipe_depth}: at most {MAX_PIPE_DEPTH} stages"


def _sm90_pipe_depth(config: GemmConfig) -> str | None:
    if config.pipe_depth >= 2:
        return _pipe_depth(config)
    # a consumer releases a stage after it has issued the next one's wgmmas, so one stage alone would wait for itself
    return f"pipe_depth = {config.pipe_depth}: {config.arch.name} needs at least 2 stages"


def _sm90_shape(config: GemmConfig) -> str | None:
    assert isinstance(config, Sm90GemmConfig)
    if config.blk_m % 64 or config.blk_m > 192:
        return f"blk_m = {config.blk_m}: a wgmma has 64 rows, a consumer takes 64, 128 or 192"
    step = 8 if config.swap_ab else 16  # stmatrix writes 16 columns at a time
    if config.blk_n % step or config.blk_n > 256:
        return f"blk_n = {config.blk_n}: multiples of {step} up to 256{'' if config.swap_ab else ', of 8 with swap_ab'}"
    return None


def _sm90_scheduler(config: GemmConfig) -> str | None:
    assert isinstance(config, Sm90GemmConfig)
    if config.scheduler == "static":
        return None
    if config.schedule == "pingpong":
        return (
            "scheduler = stream_k with schedule = pingpong: a consumer passes over the stages of the other's tile, and "
            "pieces of tiles differ in length; take schedule = cooperative"
        )
    if config.split_k > 1:
        return (
            f"scheduler = stream_k with split_k = {config.split_k}: both cut K; take split_k = 1 or scheduler = static"
        )
    if config.load == "cp_async":
        return "scheduler = stream_k with load = cp_async: no GPU has run both together; take scheduler = static"
    return None


def _sm90_registers(config: GemmConfig) -> str | None:
    assert isinstance(config, Sm90GemmConfig)
    entry = sm90_entry_registers(config)
    one_wgmma = config.blk_n // 2 + SM90_OVERHEAD_REGISTERS
    if one_wgmma > entry:
        # setmaxnreg does not help: ptxas allocates one instruction's accumulators from the entry budget (error C7602)
        return (
            f"one wgmma of n = {config.blk_n} needs {one_wgmma} registers at kernel entry, "
            f"{config.threads} threads leave {entry}"
        )
    need, limit = resources_of(config).registers, sm90_registers(config)[1]
    if need > limit:
        return (
            f"{config.blk_m}x{config.blk_n} accumulators need {need} registers a thread, "
            f"{config.num_consumers} consumers leave {limit}"
        )
    return None


def _sm90_epilogue(config: GemmConfig) -> str | None:
    assert isinstance(config, Sm90GemmConfig)
    step = 8 if config.swap_ab else 16
    if config.epi_n % step or config.blk_n % config.epi_n:
        return f"epi_n = {config.epi_n}: must be a multiple of {step} that divides blk_n = {config.blk_n}"
    if config.swap_ab and config.epi_stages > 1:
        return f"epi_stages = {config.epi_stages}: swap_ab stores D from registers, so epi_stages must be 1"
    if config.swap_ab and config.split_k == 1 and config.epi_n != step:
        return (
            f"epi_n = {config.epi_n}: swap_ab stores D from registers, and without split_k nothing is cut in chunks: "
            f"epi_n must be {step}"
        )
    return None


def _sm90_cluster(config: GemmConfig) -> str | None:
    assert isinstance(config, Sm90GemmConfig)
    if config.cta_group == 1:
        return "share = A has no meaning with cta_group = 1" if config.share == "A" else None
    if config.split_k > 1:
        return (
            f"split_k = {config.split_k} with cta_group = {config.cta_group}: a cluster is either the parts of K "
            "or a pair that shares an operand; take cta_group = 1"
        )
    rows = config.cta_cols if config.share == "B" else config.cta_rows
    if rows % 16:
        return (
            f"sharing {config.share} splits {rows} rows in two: each half must be a multiple of 8 rows (swizzle atom)"
        )
    return None


def _sm90_schedule(config: GemmConfig) -> str | None:
    assert isinstance(config, Sm90GemmConfig)
    if config.schedule != "pingpong":
        return None
    if config.num_consumers != 2:
        return f"schedule = pingpong: two consumers take turns, num_consumers = {config.num_consumers} cannot"
    if config.split_k > 1:
        return (
            f"schedule = pingpong with split_k = {config.split_k}: the parts of a tile meet in the epilogue, which "
            "pingpong puts beside another tile's mainloop; take schedule = cooperative"
        )
    return None


def _sm90_load(config: GemmConfig) -> str | None:
    assert isinstance(config, Sm90GemmConfig)
    if config.load == "tma":
        return None
    if config.cta_group > 1:
        return (
            f"load = cp_async with cta_group = {config.cta_group}: only TMA multicasts a shared operand; "
            "take cta_group = 1"
        )
    if config.blk_k < 64:
        return f"load = cp_async with blk_k = {config.blk_k}: eight lanes copy a row of 64, take blk_k = 64 or 128"
    return None


def _sm100_shape(config: GemmConfig) -> str | None:
    assert isinstance(config, Sm100GemmConfig)
    if config.swap_ab and config.blk_m != 128:
        # 64 rows lie on 16 lanes of each warp, whose registers would have to be transposed
        return f"blk_m = {config.blk_m}: swap_ab takes 128"
    allowed = (64, 128) if config.cta_group == 1 else (128,)
    if config.blk_m not in allowed:
        return f"blk_m = {config.blk_m}: cta_group {config.cta_group} takes {' or '.join(map(str, allowed))}"
    step = 16 * config.cta_group
    if config.mma_n % step or config.mma_n > 256 or config.blk_n % 16:
        return f"cta_group * blk_n = {config.mma_n}: a multiple of {step} up to 256 is needed"
    return None


def _sm100_cluster(config: GemmConfig) -> str | None:
    assert isinstance(config, Sm100GemmConfig)
    if config.split_k == 1 or config.cta_group == 1:
        return None
    return (
        f"split_k = {config.split_k} with cta_group = {config.cta_group}: a cluster is either the parts of K or the "
        "pair of one MMA; take cta_group = 1"
    )


def _sm100_scheduler(config: GemmConfig) -> str | None:
    assert isinstance(config, Sm100GemmConfig)
    if config.scheduler == "static" or config.split_k == 1:
        return None
    return (
        f"scheduler = clc with split_k = {config.split_k}: split_k is for fewer tiles than SMs, which leaves none to "
        "take over; take scheduler = static"
    )


def _sm100_tmem(config: GemmConfig) -> str | None:
    assert isinstance(config, Sm100GemmConfig)
    if config.tmem_columns <= config.arch.tmem_columns:
        return None
    return (
        f"num_consumers * acc_stages * cta_group * blk_n = {config.tmem_columns} tensor-memory columns, "
        f"{config.arch.name} has {config.arch.tmem_columns}"
    )


def _sm100_epilogue(config: GemmConfig) -> str | None:
    assert isinstance(config, Sm100GemmConfig)
    if config.mma_n % config.epi_n:
        return f"epi_n = {config.epi_n} must divide cta_group * blk_n = {config.mma_n}"
    return None


RULES: dict[str, tuple[Rule, ...]] = {
    "sm_90a": (
        lambda c: _member(c, "cta_group", (1, 2)),
        lambda c: _member(c, "num_consumers", (1, 2, 3)),
        lambda c: _member(c, "blk_k", (32, 64, 128)),
        lambda c: _member(c, "epi_stages", (1, 2, 3, 4)),
        _sm90_pipe_depth,
        _sm90_shape,
        _sm90_epilogue,
        lambda c: _member(c, "split_k", range(1, MAX_SPLIT_K + 1)),
        _sm90_cluster,
        _sm90_schedule,
        _sm90_load,
        _sm90_scheduler,
        _sm90_registers,
        _smem,
        _expect_tx,
    ),
    "sm_100a": (
        lambda c: _member(c, "cta_group", (1, 2)),
        lambda c: _member(c, "num_consumers", (1, 2)),
        lambda c: _member(c, "blk_k", (16, 32, 48, 64, 96, 128)),
        lambda c: _member(c, "epi_n", (16, 32, 64, 128)),
        lambda c: _member(c, "epi_stages", (1, 2, 3, 4)),
        lambda c: _member(c, "acc_stages", (1, 2)),
        _pipe_depth,
        _sm100_shape,
        lambda c: _member(c, "split_k", range(1, MAX_SPLIT_K + 1)),
        _sm100_cluster,
        _sm100_scheduler,
        _sm100_epilogue,
        _sm100_tmem,
        _smem,
        _expect_tx,
    ),
}


def epilogue_violation(config: GemmConfig) -> str | None:
    """Why the epilogue does not go with a tile that breaks no rule with the cheapest one, or None."""
    rule = _sm90_epilogue if isinstance(config, Sm90GemmConfig) else _sm100_epilogue
    return rule(config) or _smem(config)


def config_violation(config: GemmConfig) -> str | None:
    """Why no SM of this architecture can run the config, or None."""
    return next((reason for rule in RULES[config.arch.name] if (reason := rule(config))), None)


def violation(problem: GemmProblem, config: GemmConfig, sm_count: int) -> str | None:
    """Why this config cannot serve this problem on a device with `sm_count` SMs, or None."""
    if reason := problem_violation(problem, config.arch) or config_violation(config):
        return reason
    if sm_count < config.cluster_size:
        return f"a cluster of {config.cluster_size} CTAs needs {config.cluster_size} SMs, the device has {sm_count}"
    return fit_violation(problem, config) or _unit_violation(problem, config, sm_count)


def _unit_violation(problem: GemmProblem, config: GemmConfig, sm_count: int) -> str | None:
    """Stream-K counts blocks of K of all shared tiles in 32 bits, and one tile beyond the last."""
    if not isinstance(config, Sm90GemmConfig) or config.scheduler == "static":
        return None
    split = stream_k_of(problem, config, sm_count)
    counted = split.units + split.k_blocks
    if counted <= MAX_EXTENT:
        return None
    return (
        f"scheduler = stream_k: {split.shared_tiles} shared tiles of {split.k_blocks} blocks of K make {counted} to "
        f"count, at most {MAX_EXTENT} fit 32 bits; take scheduler = static"
    )


def fit_violation(problem: GemmProblem, config: GemmConfig) -> str | None:
    """Why a config that an SM can run does not go with the sizes of a problem that can be served, or None.

    Reads the blocks of K and whether K is a multiple of 8, nothing else of the problem.
    """
    assert isinstance(config, Sm90GemmConfig | Sm100GemmConfig)
    blocks = config.k_blocks(problem)
    if config.split_k > blocks:
        return (
            f"split_k = {config.split_k}: K = {problem.k} has {blocks} block(s) of {config.blk_k}, each part needs one"
        )
    if isinstance(config, Sm90GemmConfig) and problem.k % 8 and config.load == "tma":
        return f"k = {problem.k} is not a multiple of 8, and TMA needs 16-byte row strides: load = cp_async takes any"
    return None
