"""Shapes of real models and of public suites, and shapes on which other libraries failed: all have a legal config."""

from __future__ import annotations

import pytest

from kernels.devices import profile_named
from kernels.problem import GemmProblem
from search_space.checks import rejection
from search_space.space import count_legal, is_legal
from search_space.starting import starting_configs

H200 = profile_named("h200")

MODELS = """
1x6144x4096 16x4096x4096 1x28672x4096 32x28672x4096 64x4096x14336 256x3072x4096 4x1280x8192 128x8192x1024
16x7168x8192 1x8192x3584 64x14336x8192 256x8192x14336 1x4608x3584 16x3584x18944 128x9472x3584 32x2560x5120
256x5120x6400 32x14336x3584 1x128256x4096 32x16032x8192 4x152064x3584 1x201088x2880 16x256000x3584 1x2112x7168
1x24576x1536 1x7168x16384 128x576x7168 128x32768x512 128x4096x7168 128x256x7168 128x129280x7168 4096x2112x7168
4096x7168x16384 4096x7168x2048 4096x7168x2112 64x5120x2880 1x2880x4096 16x720x2880 16x2880x360 256x128x2880
256x7168x4096 2048x4096x3584 2048x6144x4096 4096x28672x4096 512x4096x14336 16384x4096x4096 4096x1280x8192
8192x7168x8192 2048x8192x3584 1024x57344x8192 2048x37888x3584 4096x25600x5120 8192x3584x14336 8192x5120x2880
8192x3072x768 8192x30522x768 768x3072x8192 12608x2304x768 4608x21504x3072 4608x3072x15360 1x18432x3072
8x512x500000 7000x2560x2560 8457x35x2560 32x32x16384 152710x2048x512 128x4096x9216 8192x8192x16384
3456x4096x4096
"""
HOSTILE = """
1x2048x2048 16x256x7168 8x256x6144 16x248077x2560 2072x2072x2072 1x1x131072 1x1792x5120 32x512x7168 32x32x32768
2048x2048x524288 546x9728x2560 512x4096x14336 64x64x16384 64x64x8192 8192x8192x8192 128x2880x4096 1x8x8192
1661x4608x3584 16x2560x8192 64x1536x14688 2048x4096x64 16896x128x16 46341x46341x64 16777216x128x32
49152x128x65536
"""
# One of each kind: decode, few tiles with long K, prefill, N without 16-byte rows, one tile, an operand past 2^31.
KINDS = """
1x6144x4096 64x4096x14336 128x256x7168 8x512x500000 4096x7168x2048 8192x30522x768 8457x35x2560 32x32x16384
1x1x131072 16x248077x2560 46341x46341x64
"""
UNALIGNED_K = ("1000x999x1001", "222x2048x511", "8388353x2x1", "1x705x705", "35783x1x65133")


@pytest.mark.parametrize("shape", [*MODELS.split(), *HOSTILE.split()])
def test_known_shape_has_legal_configs(shape: str) -> None:
    """On an H200, N of any alignment and element counts past 2^31 included."""
    assert count_legal(GemmProblem.parse(shape), H200) > 0


@pytest.mark.parametrize("shape", KINDS.split())
def test_kind_of_shape_has_sensible_starting_configs(shape: str) -> None:
    """Legal, not rejected, and of the form that the shape calls for."""
    problem = GemmProblem.parse(shape)
    configs = starting_configs(problem, H200)
    assert configs
    assert all(is_legal(problem, config, H200) and rejection(problem, config, H200) is None for config in configs)
    if shape in ("128x256x7168", "8x512x500000", "32x32x16384", "1x1x131072"):
        assert any(config.to_dict()["split_k"] >= 4 for config in configs)


@pytest.mark.parametrize("shape", UNALIGNED_K)
def test_k_without_16_byte_rows_starts_with_copies(shape: str) -> None:
    """TMA cannot load its rows."""
    problem = GemmProblem.parse(shape)
    configs = starting_configs(problem, H200)
    assert configs
    assert all(is_legal(problem, config, H200) and rejection(problem, config, H200) is None for config in configs)
    assert {config.to_dict()["load"] for config in configs} == {"cp_async"}
