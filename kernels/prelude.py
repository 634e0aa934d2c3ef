"""The first lines of a generated source, without the headers that it hardly uses.

TVM starts every source with the same headers. Reading them is most of a compile: a Hopper kernel takes 2.3 s of CPU
with them and 0.8 s without, and the machine code is the same but for the names of a few registers.
"""

from __future__ import annotations

import re

_BARRIER = "#include <cuda/barrier>\n"
_GROUPS = "#include <cooperative_groups.h>\n"
# What the sources use of the header, as the header defines it.
_THREAD_RANK = """\
namespace cooperative_groups {
struct thread_block {
  __device__ static unsigned int thread_rank() {
    return threadIdx.z * blockDim.y * blockDim.x + threadIdx.y * blockDim.x + threadIdx.x;
  }
};
__device__ inline thread_block this_thread_block() { return {}; }
}  // namespace cooperative_groups
"""
# The header of the 16-bit type and TVM's helpers for it, up to what every source has next.
_SIXTEEN_BIT = re.compile(
    r"#if !defined\(__CUDA_ARCH__\) \|\| \(__CUDA_ARCH__ >= \d+\)\n#include <cuda_(?:bf16|fp16)\.h>\n.*?"
    r"(?=#if defined\(__CUDA_ARCH__\) && \(__CUDA_ARCH__ < 700\)\n#define __shfl_sync)",
    flags=re.DOTALL,
)
_STORAGE = "struct __align__(2) {name} {{ unsigned short bits; }};\n"


def light(source: str) -> str:
    """The source with small stand-ins for the headers that it needs no more of.

    What is missing in a stand-in does not compile: it can make a compile fail, but not change what a kernel does.
    """
    if "cuda::barrier" not in source:
        source = source.replace(_BARRIER, "", 1)
    if source.count("cooperative_groups") == 2 and "cg::this_thread_block().thread_rank()" in source:
        source = source.replace(_GROUPS, _THREAD_RANK, 1)
    return _without_sixteen_bit_arithmetic(source)


def _without_sixteen_bit_arithmetic(source: str) -> str:
    """A kernel that converts in PTX only points at its 16-bit elements."""
    block = _SIXTEEN_BIT.search(source)
    if block is None:
        return source
    rest = source[: block.start()] + source[block.end() :]
    named = set(re.findall(r"\b\w*(?:half|bfloat)\w*\b", rest))
    if len(named) > 1 or not named <= {"half", "nv_bfloat16"}:
        return source
    stand_in = "".join(_STORAGE.format(name=name) for name in named)
    return source[: block.start()] + stand_in + source[block.end() :]
