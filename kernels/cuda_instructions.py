"""The helpers of a generated source, by the PTX instruction that each of them wraps.

The instruction is taken from the `asm` text, not from the helper's name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# What a helper does, by the text of its body. The first match counts.
_INSTRUCTIONS: tuple[tuple[str, str], ...] = (
    (r"clusterlaunchcontrol\.try_cancel\.", "try_cancel"),
    (r"clusterlaunchcontrol\.query_cancel\.", "answer_decode"),
    (r"ld\.acquire\.cta\.shared\.b128", "answer_read"),
    (r"mbarrier\.init\.", "mbarrier_init"),
    (r"mbarrier\.try_wait\.parity\.", "mbarrier_wait"),
    (r"mbarrier\.arrive\.expect_tx\.", "expect_tx"),
    (r"mbarrier\.arrive\.", "arrive"),
    (r"cp\.async\.bulk\.tensor\.\dd\.shared::cluster\.global\.", "tma_load"),
    (r"cp\.async\.bulk\.tensor\.\dd\.global\.shared::cta\.", "tma_store"),
    (r"cp\.async\.c[ag]\.shared\.global ", "row_copy"),
    (r"cp\.async\.commit_group;", "copy_commit"),
    (r"cp\.async\.wait_group (?P<n>\d+);", "copy_wait"),
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
    (r"st\.global\.v4\.f32", "part_write"),
    (r"ld\.relaxed\.gpu\.global\.v4\.f32", "part_read"),
    (r"ld\.(?:acquire|relaxed)\.gpu\.global\.u32", "count_read"),
    (r"atom\.\w+\.gpu\.global\.add\.u32", "count_up"),
    (r"st\.global\.u32", "count_reset"),
    (r"bar\.red\.popc\.u32", "vote"),
    (r"st\.global\.", "global_write"),
    (r"movmatrix\.", "lane_transpose"),
    (r"shf\.r\.wrap\.b32 ", "shift"),
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
