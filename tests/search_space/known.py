"""Measurements on an H200 that the checks and the model are held against. Times in us; ratios to `torch.matmul`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kernels.config import Sm90GemmConfig
from kernels.problem import GemmProblem


@dataclass(frozen=True, kw_only=True)
class Known:
    """A config that was measured on a shape, and the time it took."""

    problem: GemmProblem
    config: Sm90GemmConfig
    time_us: float


def sm90(consumers: int, tile: str, depth: int, *, cluster: int = 1) -> Sm90GemmConfig:
    """A config from `blk_m x blk_n x blk_k`, with the widest epilogue chunk that one swizzled store box holds."""
    blk_m, blk_n, blk_k = map(int, tile.split("x"))
    return Sm90GemmConfig(
        num_consumers=consumers,
        blk_m=blk_m,
        blk_n=blk_n,
        blk_k=blk_k,
        pipe_depth=depth,
        cta_group=cluster,
        epi_n=next(width for width in (64, 32, 16) if blk_n % width == 0),
        epi_stages=1,
    )


def _row(shape: str, dtype: str, config: Sm90GemmConfig, time_us: float) -> Known:
    return Known(problem=GemmProblem.parse(shape, dtype=dtype), config=config, time_us=time_us)


SWAPPED = Sm90GemmConfig(swap_ab=True, num_consumers=1, blk_n=8, blk_k=128, epi_n=8, epi_stages=1)
SPLIT = Sm90GemmConfig(split_k=8, num_consumers=1, blk_n=64, epi_stages=1)

# Best of a handful tried on each shape, by class of shape.
WINNERS = (
    _row("1x2112x7168", "bf16", replace(SWAPPED, pipe_depth=9, split_k=3), 11.3),
    _row("1x7168x4096", "bf16", replace(SWAPPED, pipe_depth=11), 16.0),
    _row("16x7168x4096", "fp16", replace(SWAPPED, blk_n=16, pipe_depth=9), 16.3),
    _row("8x512x500000", "bf16", replace(SWAPPED, pipe_depth=10, split_k=8), 122.9),
    _row("128x256x7168", "bf16", replace(SPLIT, pipe_depth=8, epi_n=16), 7.5),
    _row("128x576x7168", "bf16", replace(SPLIT, blk_m=128, pipe_depth=6, epi_n=32), 10.3),
    _row("1x6144x4096", "bf16", sm90(1, "64x48x128", 7), 14.6),
    _row("1x2112x7168", "bf16", sm90(1, "64x16x128", 11), 11.5),
    _row("1x2880x4096", "bf16", sm90(1, "64x32x128", 9), 9.0),
    _row("1x24576x1536", "bf16", sm90(1, "64x64x128", 6), 19.6),
    _row("4x1280x8192", "bf16", sm90(1, "64x16x128", 11), 12.2),
    _row("16x4096x4096", "bf16", sm90(1, "64x32x128", 9), 11.1),
    _row("16x720x2880", "bf16", sm90(1, "64x16x128", 11), 5.8),
    _row("16x7168x4096", "fp16", sm90(1, "64x64x128", 6), 16.6),
    _row("32x32x16384", "fp16", sm90(1, "64x32x128", 9), 21.1),
    _row("32x2560x5120", "bf16", sm90(1, "64x32x128", 9), 10.1),
    _row("32x14336x3584", "bf16", sm90(1, "64x64x128", 6), 27.9),
    _row("64x7168x4096", "fp16", sm90(1, "64x64x128", 6), 17.4),
    _row("64x4096x7168", "fp16", sm90(1, "64x32x128", 8), 18.0),
    _row("64x4096x14336", "bf16", sm90(1, "64x48x128", 7), 32.5),
    _row("64x14336x8192", "bf16", sm90(1, "64x112x128", 5), 58.1),
    _row("128x256x7168", "bf16", sm90(1, "64x16x64", 16), 13.7),
    _row("128x576x7168", "bf16", sm90(1, "64x16x64", 16), 13.9),
    _row("128x4096x7168", "bf16", sm90(1, "64x64x64", 13), 18.6),
    _row("128x4096x9216", "fp16", sm90(1, "64x64x64", 13), 23.3),
    _row("128x4096x14336", "fp16", sm90(1, "64x64x64", 12), 34.5),
    _row("256x128x2880", "bf16", sm90(1, "64x16x64", 16), 6.9),
    _row("256x3072x4096", "bf16", sm90(1, "64x96x64", 10), 12.6),
    _row("256x5120x6400", "bf16", sm90(1, "128x80x64", 8), 26.7),
    _row("256x7168x4096", "bf16", sm90(1, "128x112x64", 7), 23.7),
    _row("512x4096x14336", "bf16", sm90(1, "128x128x64", 6), 80.7),
    _row("512x7168x4096", "fp16", sm90(2, "64x224x64", 4), 42.3),
    _row("512x7168x4096", "bf16", sm90(2, "64x224x32", 7), 41.9),
    _row("1024x4096x4096", "fp16", sm90(2, "64x256x64", 4), 46.5),
    _row("2048x2048x2048", "fp16", sm90(2, "64x256x64", 4), 25.4),
    _row("2048x6144x4096", "bf16", sm90(2, "128x192x64", 3), 129.1),
    _row("4096x4096x4096", "fp16", sm90(2, "64x256x64", 4, cluster=2), 179.9),
    _row("4096x4096x4096", "bf16", sm90(2, "64x256x64", 4), 175.6),
    _row("4096x4096x16384", "fp16", sm90(2, "64x256x64", 4), 710.4),
    _row("4096x7168x4096", "fp16", sm90(2, "64x256x64", 4, cluster=2), 314.1),
    _row("4000x5000x3000", "fp16", sm90(2, "64x256x64", 4, cluster=2), 174.4),
    _row("7000x2560x2560", "bf16", sm90(2, "64x224x64", 4), 123.6),
    _row("8192x8192x8192", "bf16", sm90(2, "64x256x64", 4), 1387.4),
    _row("8192x8192x1024", "fp16", sm90(2, "64x256x64", 4), 194.3),
    _row("8192x3072x768", "fp16", sm90(2, "64x256x64", 4), 58.3),
    _row("12608x2304x768", "fp16", sm90(3, "64x192x64", 3), 65.7),
    _row("16384x4096x4096", "bf16", sm90(2, "64x256x64", 4, cluster=2), 703.8),
)
