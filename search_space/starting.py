"""What a study tries first: presets, configs that were measured to be good, the best of nearby problems, what NVIDIA's
heuristics say, and the performance model's picks. Each source can be left out.

Starting configs are legal, not rejected, distinct, and always in the same order for the same problem and device, so
that a study repeats. A problem that can be served at all has at least one.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf, log2
from typing import TYPE_CHECKING

from kernels.config import GemmConfig, Sm90GemmConfig, Sm100GemmConfig
from kernels.errors import ConfigError
from kernels.rules import config_violation, epilogue_violation, fit_violation
from search_space.checks import plainest, rejection, tile_rejection
from search_space.heuristics import heuristic_configs
from search_space.model import predict, rank
from search_space.space import choices, fitting_depths, loads_plainly, tiles
from search_space.translate import translated
from search_space.walk import walk_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from kernels.devices import DeviceProfile
    from kernels.problem import GemmProblem

STARTING_CONFIGS = 14
MEASURED_CONFIGS = 6  # at most, so that the model has a say as well
LEAST_COPYING_DEPTH = 3  # one stage under way while one is moved and one multiplied
PICKS_KEPT = 64  # lists of picks: ranking all tiles takes half a second, and studies of one problem follow one another
PICKS_PER_TILE = 2  # of the model's, so that its picks differ in more than the cluster

# The three last steps of the ladder, and the same steps on Hopper: one consumer with a double buffer, a cluster of two
# that shares B, and a second consumer that shares the staged B. All stage blocks of 128 x 128 x 64.
PRESETS: dict[str, GemmConfig] = {
    "step7": Sm100GemmConfig(cta_group=1, num_consumers=1, pipe_depth=2, blk_m=128, blk_n=128, blk_k=64),
    "step8": Sm100GemmConfig(cta_group=2, num_consumers=1, pipe_depth=4, blk_m=128, blk_n=128, blk_k=64),
    "step9": Sm100GemmConfig(cta_group=2, num_consumers=2, pipe_depth=4, blk_m=128, blk_n=128, blk_k=64),
    "h-step7": Sm90GemmConfig(cta_group=1, num_consumers=1, pipe_depth=2, blk_m=128, blk_n=128, blk_k=64),
    "h-step8": Sm90GemmConfig(cta_group=2, num_consumers=1, pipe_depth=4, blk_m=128, blk_n=128, blk_k=64),
    "h-step9": Sm90GemmConfig(cta_group=2, num_consumers=2, pipe_depth=4, blk_m=128, blk_n=128, blk_k=64, epi_stages=1),
}


def preset(name: str) -> GemmConfig:
    """A config by name. Raises ConfigError naming the presets there are."""
    try:
        return PRESETS[name]
    except KeyError:
        raise ConfigError(f"unknown preset {name!r}: presets are {', '.join(PRESETS)}", knob="preset") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredConfig:
    """A config that was the best of those tried on a measured shape.

    config: the knobs
    rows: fewest and most rows of A it is good for
    where: shapes, and the ratio to `torch.matmul` reached there on an H200
    """

    config: GemmConfig
    rows: tuple[int, int]
    where: str

    def names(self, problem: GemmProblem) -> bool:
        """Whether it was measured on this shape, in whatever dtype."""
        cube = f"{problem.m}^3" if problem.m == problem.n == problem.k else problem.shape
        return any(shape in (problem.shape, cube) for shape in re.findall(r"[0-9x^]+", self.where))


def _won(
    blk_m: int,
    blk_n: int,
    blk_k: int,
    *,
    depth: int,
    rows: tuple[int, int],
    where: str,
    consumers: int = 1,
    cluster: int = 1,
    swap: bool = False,
    split: int = 1,
    epi_n: int = 0,
    pingpong: bool = False,
) -> MeasuredConfig:
    config = Sm90GemmConfig(
        num_consumers=consumers,
        blk_m=blk_m,
        blk_n=blk_n,
        blk_k=blk_k,
        pipe_depth=depth,
        cta_group=cluster,
        epi_n=epi_n or (8 if swap else _epilogue_width(blk_n)),
        epi_stages=1 if swap or pingpong or split > 1 else 2,
        swap_ab=swap,
        split_k=split,
        schedule="pingpong" if pingpong else "cooperative",
    )
    return MeasuredConfig(config=config, rows=rows, where=where)


def _epilogue_width(blk_n: int) -> int:
    """The widest chunk that one swizzled TMA store box holds."""
    return next(width for width in (64, 32, 16, 8) if blk_n % width == 0)


MANY = (1024, 2**31 - 1)  # the tensor core limits
MORE = (257, 2**31 - 1)
HUNDREDS = (257, 1023)  # one wave of tiles, shaped to fill the SMs
FEWER = (65, 512)
DECODE = (1, 64)  # device memory limits: narrow tiles for all SMs and a deep ring of long stages
MEASURED: tuple[MeasuredConfig, ...] = (
    _won(64, 256, 64, consumers=2, cluster=2, depth=4, rows=MANY, where="4096^3 fp16 1.00, 16384x4096x4096 bf16 1.02"),
    _won(64, 256, 64, consumers=2, depth=4, rows=MANY, where="8192^3 1.02, 8192x8192x1024 fp16 1.04"),
    _won(128, 192, 64, consumers=2, depth=3, rows=MANY, where="2048x6144x4096 bf16 1.04"),
    _won(128, 192, 64, consumers=2, depth=4, pingpong=True, rows=MANY, where="8192x3072x768 1.10, 7000x2560x2560 0.98"),
    _won(64, 192, 64, consumers=3, depth=3, rows=MANY, where="12608x2304x768 fp16 1.06"),
    _won(128, 128, 64, consumers=2, depth=6, pingpong=True, rows=MANY, where="8192x3072x768 fp16 1.06"),
    _won(64, 224, 64, consumers=2, depth=4, rows=MORE, where="512x7168x4096 fp16 1.07, 7000x2560x2560 bf16 0.97"),
    _won(64, 224, 32, consumers=2, depth=7, rows=HUNDREDS, where="512x7168x4096 bf16 1.00"),
    _won(128, 128, 64, depth=6, rows=HUNDREDS, where="512x4096x14336 bf16 0.99"),
    _won(128, 112, 64, depth=7, rows=FEWER, where="256x7168x4096 bf16 0.99"),
    _won(128, 80, 64, depth=8, rows=FEWER, where="256x5120x6400 bf16 1.02"),
    _won(64, 128, 64, consumers=2, depth=6, rows=FEWER, where="128x32768x512 bf16"),
    _won(64, 96, 64, depth=10, rows=FEWER, where="256x3072x4096 bf16 1.09"),
    _won(64, 64, 64, depth=12, rows=FEWER, where="128x4096x14336 fp16 1.10, 128x4096x9216 fp16 1.20 (depth 13)"),
    _won(64, 16, 64, depth=16, rows=FEWER, where="256x128x2880 bf16 1.12"),
    _won(64, 64, 64, depth=8, split=8, epi_n=16, rows=FEWER, where="128x256x7168 bf16 1.09"),
    _won(128, 64, 64, depth=6, split=8, epi_n=32, rows=FEWER, where="128x576x7168 bf16 1.03"),
    _won(64, 8, 128, depth=9, swap=True, split=3, rows=(1, 8), where="1x2112x7168 bf16 1.18"),
    _won(64, 8, 128, depth=11, swap=True, rows=(1, 8), where="1x7168x4096 bf16 1.22"),
    _won(64, 16, 128, depth=9, swap=True, rows=(9, 16), where="16x7168x4096 fp16 1.05"),
    _won(64, 64, 128, depth=6, rows=DECODE, where="64x7168x4096 fp16 1.05, 1x24576x1536 bf16 1.11"),
    _won(64, 32, 128, depth=9, rows=DECODE, where="64x4096x7168 fp16 1.23 (depth 8), 1x2880x4096 bf16 1.33"),
    _won(64, 48, 128, depth=7, rows=DECODE, where="64x4096x14336 bf16 1.12, 1x6144x4096 bf16 1.10"),
    _won(64, 112, 128, depth=5, rows=DECODE, where="64x14336x8192 bf16 1.08"),
    _won(64, 16, 128, depth=11, rows=DECODE, where="1x2112x7168 bf16 1.18, 16x720x2880 bf16 1.32"),
)


# In this order; what a study uses unless it is told otherwise.
SOURCES = ("presets", "measured", "neighbours", "heuristics", "model")
NEIGHBOUR_CONFIGS = 4  # at most
HEURISTIC_CONFIGS = 4  # at most
# What was good for other problems is not worth a trial where the model expects it to take so much longer than its own
# best pick: among the configs of a class of shapes some took three times as long as the best (128x129280x7168, H200).
WORST_START = 1.3
OTHER_DEVICE = 2.0  # distance, as four times as many rows
OTHER_DTYPE = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """The best known config of another problem.

    problem: what it was tuned for
    config: the winner
    device: name of the device that it was tuned on
    """

    problem: GemmProblem
    config: GemmConfig
    device: str

    def distance(self, problem: GemmProblem, device: str) -> float:
        """How far away a problem is: doublings of M, N and K, and a price for another dtype or device."""
        sizes = ((getattr(self.problem, side), getattr(problem, side)) for side in ("m", "n", "k"))
        steps = sum(abs(log2(theirs / ours)) for theirs, ours in sizes)
        return steps + OTHER_DTYPE * (self.problem.dtype != problem.dtype) + OTHER_DEVICE * (self.device != device)


def starting_configs(
    problem: GemmProblem,
    profile: DeviceProfile,
    *,
    sources: Collection[str] = SOURCES,
    tuned: Iterable[Tuned] = (),
    blind: bool = False,
) -> tuple[GemmConfig, ...]:
    """Configs to try first, in the order of `SOURCES`. With all sources, empty only when the problem cannot be served.

    sources: which of `SOURCES` may be used
    tuned: winners of other problems, for the source "neighbours"
    blind: use nothing that was measured on this very shape, for replays that ask what an unknown shape would get
    Raises ValueError for an unknown source.
    """
    if unknown := sorted(set(sources) - set(SOURCES)):
        raise ValueError(f"unknown starting source {unknown[0]!r}: use some of {', '.join(SOURCES)}")
    chosen: dict[str, GemmConfig] = {}
    picks = model_picks(problem, profile, STARTING_CONFIGS)
    limit_us = WORST_START * min((predict(problem, pick, profile).time_us for pick in picks), default=inf)

    def add(configs: Iterable[GemmConfig], most: int) -> None:
        worth = _worth_asking(problem, configs, profile)
        good = {key: one for key, one in worth.items() if predict(problem, one, profile).time_us <= limit_us}
        chosen.update(list(good.items())[:most])

    if "presets" in sources:
        known = [config for config in PRESETS.values() if config.arch.name == profile.arch.name]
        chosen |= _worth_asking(problem, known, profile)
    if "measured" in sources:
        add(_measured(problem, profile, blind=blind), MEASURED_CONFIGS)
    if "neighbours" in sources:
        add(neighbour_configs(problem, profile, tuned), NEIGHBOUR_CONFIGS)
    if "heuristics" in sources:
        add(heuristic_configs(problem, profile), HEURISTIC_CONFIGS)
    if "model" in sources:
        for config in picks:
            if len(chosen) >= STARTING_CONFIGS:
                break
            chosen.setdefault(config.key, config)
    return tuple(chosen.values())


def _measured(problem: GemmProblem, profile: DeviceProfile, *, blind: bool) -> list[GemmConfig]:
    """Configs that won on shapes of this class."""
    entries = (entry for entry in MEASURED if entry.rows[0] <= problem.m <= entry.rows[1])
    return [
        entry.config
        for entry in entries
        if entry.config.arch.name == profile.arch.name and not (blind and entry.names(problem))
    ]


def neighbour_configs(
    problem: GemmProblem, profile: DeviceProfile, tuned: Iterable[Tuned], count: int = NEIGHBOUR_CONFIGS
) -> tuple[GemmConfig, ...]:
    """Winners of the nearest problems, translated to be legal here, the nearest first; at most `count`."""
    others = [one for one in tuned if one.problem != problem and one.config.arch.name == profile.arch.name]
    nearest = sorted(others, key=lambda one: (one.distance(problem, profile.name), one.problem.key, one.config.key))
    moved = (translated(one.config, problem, profile) for one in nearest[: 2 * count])
    found = {config.key: config for config in moved if config is not None}
    return tuple(found.values())[:count]


@lru_cache(maxsize=PICKS_KEPT)
def model_picks(problem: GemmProblem, profile: DeviceProfile, count: int) -> tuple[GemmConfig, ...]:
    """At most `count` configs that the model expects to be fastest, at most two of one CTA tile."""
    picks: dict[str, GemmConfig] = {}
    seen: Counter[tuple[int, int]] = Counter()
    for config, _ in rank(problem, _candidates(problem, profile), profile):
        tile = (config.cta_rows, config.cta_cols)
        if seen[tile] == PICKS_PER_TILE:
            continue
        plain = plainest(problem, config, profile)
        if plain.key not in picks and rejection(problem, plain, profile) is None:
            seen[tile] += 1
            picks[plain.key] = plain
        if len(picks) == count:
            break
    return tuple(picks.values())


def _worth_asking(problem: GemmProblem, configs: Iterable[GemmConfig], profile: DeviceProfile) -> dict[str, GemmConfig]:
    """The configs that can be asked, each as the plainest config that does the same, by key and in order."""
    kept: dict[str, GemmConfig] = {}
    for any_rows in configs:
        config = _loading(problem, any_rows)
        if profile.sm_count >= config.cluster_size:
            plain = plainest(problem, config, profile)
            if rejection(problem, plain, profile) is None:
                kept.setdefault(plain.key, plain)
    return kept


def _loading(problem: GemmProblem, config: GemmConfig) -> GemmConfig:
    """The config itself, or where TMA cannot load the rows the nearest that can: alone, with a ring that fits."""
    if loads_plainly(problem, config) and fit_violation(problem, config) is None:
        return config
    if not isinstance(config, Sm90GemmConfig) or problem.k % 8 == 0:
        return config
    copying = replace(config, load="cp_async", cta_group=1, share="B", blk_k=max(64, config.blk_k))
    while copying.pipe_depth > LEAST_COPYING_DEPTH and config_violation(copying):
        copying = replace(copying, pipe_depth=copying.pipe_depth - 1)
    return copying


def _candidates(problem: GemmProblem, profile: DeviceProfile) -> Iterator[GemmConfig]:
    """For each tile of the space the deepest pipeline beside a good epilogue, with the default order of tiles.

    The model knows no case in which a shallower ring is faster, and hardly tells epilogues and orders apart: those are
    left to the search.
    """
    depths = tuple(int(depth) for depth in choices(profile.arch)["pipe_depth"])
    for tile in tiles(profile.arch.name):
        if profile.sm_count < tile.cluster_size or fit_violation(problem, tile) or not loads_plainly(problem, tile):
            continue
        walk = walk_of(problem, tile, profile.sm_count)
        if tile_rejection(problem, tile, profile, walk):
            continue
        if (deep := _deepest(problem, tile, depths)) is not None:
            yield deep


def _deepest(problem: GemmProblem, tile: GemmConfig, depths: tuple[int, ...]) -> GemmConfig | None:
    """A tile with the best epilogue that leaves room for three stages, or for two where none does."""
    found = None
    for epi_n, epi_stages in _epilogues(tile):
        shallow = replace(tile, epi_n=epi_n, epi_stages=epi_stages, l2_group_size=8, raster="m")
        if epilogue_violation(shallow) or fit_violation(problem, shallow):
            continue
        if fitting := fitting_depths(shallow, depths):
            found = replace(shallow, pipe_depth=fitting[-1])
        if len(fitting) > 1:
            break
    return found


def _epilogues(tile: GemmConfig) -> Iterator[tuple[int, int]]:
    """Width and stages of epilogues worth trying, the best first."""
    width = _epilogue_width(tile.epilogue_cols)
    if not isinstance(tile, Sm90GemmConfig) or tile.split_k == 1:
        yield from ((width, 2), (width, 1), (tile.epi_n, 1))
        return
    # Enough chunks for every CTA of the cluster to own one, so that all share the sums and stores.
    whole = tile.blk_m // 64 * tile.blk_n
    widths = [width for width in (64, 32, 16, 8) if tile.blk_n % width == 0]
    for width in sorted(widths, key=lambda width: (whole // width < tile.split_k, -width)):
        yield width, 1
