"""Structural rules on the generated CUDA: clean kernels have no finding, each planted fault has the right one."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace

import pytest

from kernels.config import GemmConfig, Sm90GemmConfig, Sm100GemmConfig
from kernels.cuda_expressions import SourceError
from kernels.cuda_instructions import read_helpers
from kernels.cuda_source import read_kernel
from kernels.lowering import LoweredKernel, lower
from kernels.problem import GemmProblem
from kernels.structure import RULES, Finding, structural_findings

pytest.importorskip("tvm")

SM_COUNT = {"sm_90a": 132, "sm_100a": 148}
SMALL = GemmProblem(m=512, n=192, k=256)
RAGGED = GemmProblem(m=1000, n=776, k=520)


@dataclass(frozen=True)
class Case:
    """One kernel to lower."""

    config: GemmConfig
    problem: GemmProblem = SMALL
    fault: str = ""
    dynamic_m: bool = False

    @property
    def variant(self) -> dict[str, object]:
        """What `lower` is told beside problem and config."""
        dynamic = {"dynamic_m": True} if self.dynamic_m else {}
        return dynamic | ({"fault": self.fault} if self.fault else {})

    @property
    def label(self) -> str:
        if self.fault:
            return f"{self.config.arch.name}-{self.fault}"
        return f"{self.problem.shape}-{self.config.key}{'-dynamic' * self.dynamic_m}"


def sm90(problem: GemmProblem = SMALL, **knobs: object) -> Case:
    return Case(Sm90GemmConfig.from_dict(knobs), problem)


def sm100(problem: GemmProblem = SMALL, **knobs: object) -> Case:
    return Case(Sm100GemmConfig.from_dict(knobs), problem)


# Small tiles, because a kernel is lowered in the time that its unrolled statements take. Three chunks for two staging
# buffers, so that a restarted buffer index shows.
HOPPER = sm90(cta_group=2, num_consumers=1, blk_n=48, epi_n=16, blk_k=32, pipe_depth=2)
SPLIT = sm90(GemmProblem(m=128, n=96, k=448), split_k=3, num_consumers=1, blk_n=48, epi_n=16, blk_k=64, pipe_depth=2)
PINGPONG = sm90(
    GemmProblem(m=512, n=192, k=200), schedule="pingpong", num_consumers=2, blk_n=48, epi_n=16, blk_k=32, pipe_depth=3
)
STREAM_K = sm90(
    GemmProblem(m=132 * 64 + 40, n=96, k=200), scheduler="stream_k", num_consumers=1, blk_n=48, epi_n=16, blk_k=32,
    pipe_depth=2,
)  # fmt: skip
# fewer tiles than clusters
STREAM_K_MANY = sm90(
    GemmProblem(m=128, n=96, k=4096), scheduler="stream_k", num_consumers=1, blk_n=48, epi_n=16, blk_k=64, pipe_depth=2
)
COPYING = sm90(
    GemmProblem(m=512, n=95, k=201), load="cp_async", num_consumers=1, blk_n=32, epi_n=16, epi_stages=1, pipe_depth=4
)
BLACKWELL = sm100(cta_group=2, num_consumers=1, blk_n=48, epi_n=32, epi_stages=2, blk_k=16, pipe_depth=2)
BLACKWELL_TWO = sm100(cta_group=2, num_consumers=2, acc_stages=2, blk_n=32, epi_n=32, blk_k=16, pipe_depth=2)
BLACKWELL_SPLIT = sm100(
    GemmProblem(m=256, n=192, k=448),
    split_k=3,
    cta_group=1,
    num_consumers=1,
    blk_n=64,
    epi_n=16,
    blk_k=64,
    pipe_depth=2,
)
BLACKWELL_CLC = sm100(scheduler="clc", cta_group=2, num_consumers=1, blk_n=48, epi_n=32, blk_k=16, pipe_depth=2)

CLEAN = (
    HOPPER,
    sm90(RAGGED, cta_group=2, share="A", blk_n=64, epi_n=32, epi_stages=3, raster="n"),
    sm90(RAGGED, cta_group=2, share="B", num_consumers=2, blk_n=128, raster="m-serpentine"),
    sm90(RAGGED, num_consumers=3, blk_n=96, epi_n=32, epi_stages=2, pipe_depth=3),
    sm90(GemmProblem(m=16, n=1032, k=4096), num_consumers=1, blk_n=64, blk_k=128, epi_stages=1, pipe_depth=6),
    sm90(num_consumers=1, blk_m=128, blk_n=80, epi_n=80, epi_stages=4, pipe_depth=2, raster="n-serpentine"),
    sm90(GemmProblem(m=200, n=264, k=8), num_consumers=2, blk_n=48, epi_n=16, epi_stages=4, blk_k=32),
    sm90(GemmProblem(m=8192, n=8192, k=16384), cta_group=2, num_consumers=2, blk_n=192, epi_stages=2),
    sm90(GemmProblem(m=16, n=7168, k=4096), swap_ab=True, num_consumers=1, blk_n=16, epi_n=8, epi_stages=1, blk_k=128),
    sm90(GemmProblem(m=100, n=333, k=520), swap_ab=True, num_consumers=2, blk_n=104, epi_n=8, epi_stages=1),
    sm90(GemmProblem(m=8, n=512, k=50000), swap_ab=True, split_k=16, num_consumers=1, blk_n=8, epi_n=8, epi_stages=1),
    sm90(GemmProblem(m=128, n=256, k=7168), split_k=8, num_consumers=1, blk_n=64, epi_n=16, pipe_depth=6),
    sm90(GemmProblem(m=512, n=512, k=4096), split_k=2, num_consumers=2, blk_n=256, epi_stages=1, pipe_depth=3),
    SPLIT,
    STREAM_K,
    STREAM_K_MANY,
    sm90(GemmProblem(m=3000, n=2000, k=520), scheduler="stream_k", cta_group=2, share="A", blk_n=128, epi_n=32),
    sm90(GemmProblem(m=9000, n=333, k=200), scheduler="stream_k", num_consumers=2, blk_n=96, epi_n=96, epi_stages=1),
    sm90(
        GemmProblem(m=16, n=7168, k=4096),
        scheduler="stream_k",
        swap_ab=True,
        num_consumers=1,
        blk_n=16,
        epi_n=8,
        epi_stages=1,
        blk_k=128,
    ),
    PINGPONG,
    sm90(RAGGED, schedule="pingpong", cta_group=2, share="A", blk_m=64, blk_n=64, epi_n=32, pipe_depth=4),
    COPYING,
    sm90(GemmProblem(m=333, n=264, k=1001), load="cp_async", num_consumers=1, blk_m=192, blk_n=48, epi_n=16),
    sm90(
        GemmProblem(m=13, n=200, k=705),
        load="cp_async",
        swap_ab=True,
        split_k=3,
        num_consumers=1,
        blk_n=24,
        epi_n=8,
        epi_stages=1,
        blk_k=128,
        pipe_depth=2,
    ),
    sm90(GemmProblem(m=1000, n=777, k=520), cta_group=2, num_consumers=2, blk_n=96, epi_n=96, epi_stages=1),
    sm90(GemmProblem(m=300, n=1030, k=512), split_k=2, num_consumers=1, blk_n=64, epi_n=16, epi_stages=1),
    replace(sm90(RAGGED, cta_group=2, share="A", blk_n=64, raster="n-serpentine"), dynamic_m=True),
    replace(sm90(GemmProblem(m=5, n=776, k=520), swap_ab=True, blk_n=16, epi_n=8, epi_stages=1), dynamic_m=True),
    replace(
        sm90(GemmProblem(m=77, n=95, k=201), load="cp_async", num_consumers=1, blk_n=64, epi_stages=1), dynamic_m=True
    ),
    BLACKWELL,
    sm100(RAGGED, cta_group=2, num_consumers=2),
    sm100(RAGGED, cta_group=1, num_consumers=1, blk_m=64, blk_n=64, epi_n=32, epi_stages=3, acc_stages=2),
    sm100(RAGGED, cta_group=1, num_consumers=2, blk_n=96, epi_n=32, epi_stages=2, raster="n"),
    sm100(cta_group=2, num_consumers=1, blk_n=64, epi_n=16, epi_stages=4, acc_stages=2, pipe_depth=1),
    # 17 K blocks and a copy loop of 16: only the K loop may be shortened
    sm100(RAGGED, cta_group=2, num_consumers=2, blk_n=64, blk_k=32, epi_n=128, acc_stages=2, raster="m-serpentine"),
    sm100(
        GemmProblem(m=136, n=72, k=200),
        cta_group=1,
        num_consumers=1,
        blk_n=48,
        blk_k=128,
        epi_n=16,
        epi_stages=2,
        pipe_depth=3,
    ),
    sm100(GemmProblem(m=1, n=2048, k=8192), cta_group=1, num_consumers=1, blk_n=128, raster="n-serpentine"),
    BLACKWELL_SPLIT,
    BLACKWELL_CLC,
    sm100(RAGGED, scheduler="clc", cta_group=1, num_consumers=2, blk_n=64, acc_stages=2, raster="n-serpentine"),
    sm100(RAGGED, cta_group=2, num_consumers=2, swap_ab=True, blk_n=48, epi_n=32, epi_stages=2, acc_stages=2),
    sm100(
        GemmProblem(m=20, n=1032, k=1000),
        cta_group=1,
        num_consumers=2,
        swap_ab=True,
        split_k=4,
        blk_n=32,
        epi_n=16,
        pipe_depth=3,
    ),
)

# The rule that names each fault of the templates. None: the source keeps the protocol, other gates have to see it.
HOPPER_FAULTS: dict[str, str | None] = {
    "producer_phase": "barrier phase",
    "arrive_count": "barrier init",
    "expect_tx": "transaction bytes",
    "no_full_wait": "full wait",
    "no_empty_wait": "empty wait",
    "early_release": "stage release",
    "no_accumulator_wait": "accumulator read",
    "no_store_wait": "staging reuse",
    "epilogue_restart": "staging reuse",
    "no_proxy_fence": "proxy fence",
    "no_stage_barrier": "staging barrier",
    "init_without_cluster_barrier": "init barrier",
    "exit_without_cluster_barrier": "exit barrier",
    "half_multicast": "multicast mask",
    "wrong_row": None,  # a coordinate: the comparison sees it
    "illegal_address": "staging barrier",  # the store finds a buffer that nothing was written to
}
CLC_FAULTS: dict[str, str | None] = {
    "no_answer_wait": "answer wait",
    "no_answer_slot_wait": "answer place",
    "no_answer_release": "arrival count",
    "answer_count": "barrier init",
    "answer_bytes": "transaction bytes",
    "answer_to_leader_only": "request",
}
# With one consumer there are registers to spare.
HOPPER_TWO_FAULTS: dict[str, str | None] = {"register_pool": "register pool"}
SPLIT_FAULTS: dict[str, str | None] = {
    "no_parts_wait": "sum wait",
    "no_sum_wait": "parts wait",
    "parts_bytes": "transaction bytes",
    "early_sum_release": "sum release",
}
PINGPONG_FAULTS: dict[str, str | None] = {"no_turn": "turn"}
STREAM_K_FAULTS: dict[str, str | None] = {
    "no_part_count": "part count",
    "no_part_fence": "part fence",
    "no_part_barrier": "part count",
    "no_count_reset": "count reset",
}
COPY_FAULTS: dict[str, str | None] = {
    "no_copy_wait": "copy wait",
    "no_copy_barrier": "copy wait",
    "no_read_barrier": "move barrier",
    "no_fill_fence": "fill fence",
    "early_fill": "fill fence",
    "whole_pieces": None,  # values: the comparison sees them
}
# The first template's faults where D is stored by threads.
MASKED_FAULTS: dict[str, str | None] = {"no_store_wait": "staging reuse", "no_stage_barrier": "staging barrier"}
BLACKWELL_FAULTS: dict[str, str | None] = {
    "phase": "barrier phase",
    "acc_phase": "barrier phase",
    "expect_tx": "transaction bytes",
    "arrive_count": "barrier init",
    "both_announce": "transaction bytes",
    "own_full": "transaction bytes",
    "own_drained": "accumulator release",
    "one_cta_mask": "commit mask",
    "result_mask": "commit mask",
    "no_empty_wait": "empty wait",
    "no_full_wait": "full wait",
    "no_acc_wait": "accumulator wait",
    "no_result_wait": "result wait",
    "no_ld_wait": "accumulator read",
    "no_store_wait": "staging reuse",
    "no_exit_wait": "exit store wait",
    "no_stage_drain": "stage drain",
    "no_stage_commit": "mma commit",
    "no_result_commit": "mma commit",
    "no_store_commit": "store commit",
    "no_proxy_fence": "proxy fence",
    "no_after_fence": "tcgen05 fence",
    "no_mma_fence": "tcgen05 fence",
    "no_before_fence": "tcgen05 fence",
    "no_init_fence": "init fence",
    "no_staging_sync": "staging barrier",
    "cta_sync_in_role": "warpgroup",
    "no_cluster_sync": "init barrier",
    "no_init_sync": "init barrier",
    "cta_exit": "exit barrier",
    "early_release": "accumulator release",
    "early_stage_release": "full wait",
    "staging_restart": "staging reuse",
    "one_buffer_short": "staging reuse",
    "dealloc_two_warps": "tensor memory",
    "no_dealloc": "tensor memory",
    "stale_accumulator": "accumulator start",
    "same_b_half": None,  # a coordinate
}
# These need a second consumer, or a second accumulator slot, to take effect.
BLACKWELL_TWO_FAULTS: dict[str, str | None] = {"shared_sync": "warpgroup", "one_accumulator": "accumulator wait"}
FAULTY = tuple(
    (replace(base, fault=fault), rule)
    for base, faults in (
        (HOPPER, HOPPER_FAULTS),
        (PINGPONG, HOPPER_TWO_FAULTS),
        (SPLIT, SPLIT_FAULTS),
        (PINGPONG, PINGPONG_FAULTS),
        (STREAM_K, STREAM_K_FAULTS),
        (STREAM_K_MANY, STREAM_K_FAULTS),
        (COPYING, COPY_FAULTS),
        (COPYING, MASKED_FAULTS),
        (BLACKWELL, BLACKWELL_FAULTS),
        (BLACKWELL_TWO, BLACKWELL_TWO_FAULTS),
        (BLACKWELL_SPLIT, SPLIT_FAULTS),
        (BLACKWELL_CLC, CLC_FAULTS),
    )
    for fault, rule in faults.items()
)


def _lower(case: Case) -> LoweredKernel:
    return lower(case.problem, case.config, SM_COUNT[case.config.arch.name], **case.variant)


@pytest.fixture(scope="session")
def lowered(request: pytest.FixtureRequest) -> Iterator[Callable[[Case], LoweredKernel]]:
    """Lowered kernels by case: each once a session, two at a time, those of the selected tests ahead of their use."""
    pool = ProcessPoolExecutor(max_workers=2, mp_context=multiprocessing.get_context("spawn"))
    futures: dict[Case, Future[LoweredKernel]] = {}

    def get(case: Case) -> LoweredKernel:
        if case not in futures:
            futures[case] = pool.submit(_lower, case)
        return futures[case].result()

    for item in request.session.items:
        case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
        if isinstance(case, Case) and case not in futures:
            futures[case] = pool.submit(_lower, case)
    yield get
    pool.shutdown(cancel_futures=True)


Lowered = Callable[[Case], LoweredKernel]


def findings_of(kernel: LoweredKernel, case: Case) -> tuple[Finding, ...]:
    return structural_findings(kernel, case.problem, case.config)


def rules_of(findings: tuple[Finding, ...]) -> set[str]:
    return {finding.rule for finding in findings}


@pytest.mark.parametrize("case", CLEAN, ids=lambda case: case.label)
def test_clean_kernel_has_no_finding(case: Case, lowered: Lowered) -> None:
    """The templates keep their own protocol over knobs and shapes."""
    assert findings_of(lowered(case), case) == ()


@pytest.mark.parametrize(("case", "rule"), FAULTY, ids=lambda value: value.label if isinstance(value, Case) else "")
def test_planted_fault_is_named_by_its_rule(case: Case, rule: str | None, lowered: Lowered) -> None:
    """Each fault of the templates is found under the rule of the table, or is marked there as not structural."""
    findings = findings_of(lowered(case), case)
    if rule is None:
        assert findings == ()
    else:
        assert rule in rules_of(findings)


def test_tables_cover_every_fault_of_both_templates() -> None:
    """A fault added to a template needs a line in the tables above."""
    from kernels import gemm_sm90, gemm_sm100

    assert set(HOPPER_FAULTS | HOPPER_TWO_FAULTS) == set(gemm_sm90.FAULTS)
    assert set(SPLIT_FAULTS) == set(gemm_sm90.SPLIT_FAULTS)
    assert set(PINGPONG_FAULTS) == set(gemm_sm90.PINGPONG_FAULTS)
    assert set(COPY_FAULTS) == set(gemm_sm90.COPY_FAULTS)
    assert set(STREAM_K_FAULTS) == set(gemm_sm90.STREAM_K_FAULTS)
    assert set(BLACKWELL_FAULTS | BLACKWELL_TWO_FAULTS) == set(gemm_sm100.FAULTS)
    assert set(SPLIT_FAULTS) == set(gemm_sm100.SPLIT_FAULTS)
    assert set(CLC_FAULTS) == set(gemm_sm100.CLC_FAULTS)


# ---------------------------------------------------------------------------------------------- edits of clean sources

Edit = Callable[[str], str]


def _calls(source: str, kind: str) -> list[str]:
    """Lines of the kernel that call a helper of this kind."""
    names = {name for name, helper in read_helpers(source).items() if helper.kind == kind}
    return [line for line in source.split("\n") if (m := re.match(r" +(\w+)\(.*\);$", line)) and m[1] in names]


def without(kind: str, which: slice = slice(None)) -> Edit:
    """Leave out calls of one kind, by default all of them."""

    def edit(source: str) -> str:
        for line in _calls(source, kind)[which]:
            source = source.replace(line + "\n", "", 1)
        return source

    return edit


def twice(kind: str) -> Edit:
    """Do the last call of one kind again."""

    def edit(source: str) -> str:
        line = _calls(source, kind)[-1]
        return source.replace(line, f"{line}\n{line}", 1)

    return edit


def swapped(first: str, second: str) -> Edit:
    """Exchange two calls that stand one after the other."""

    def edit(source: str) -> str:
        one, two = _calls(source, first)[-1], _calls(source, second)[-1]
        return source.replace(f"{one}\n{two}", f"{two}\n{one}", 1)

    return edit


def last_wait_of_ring(source: str) -> str:
    """Leave out the wait of the producer's last lap: the one after its tile loop."""
    head, loop, tail = source.partition("for (int _stage")
    wait = _calls(source, "mbarrier_wait")[0]
    assert loop
    return head + loop + tail.replace(wait.strip(), "", 1)


def substitute(pattern: str, replacement: str) -> Edit:
    def edit(source: str) -> str:
        edited, count = re.subn(pattern, replacement, source)
        assert count, f"{pattern} is not in the source"
        return edited

    return edit


def before_mma(statement: str) -> Edit:
    """Put a statement in front of the first wgmma or tcgen05.mma."""

    def edit(source: str) -> str:
        line = next(iter(_calls(source, "wgmma") + _calls(source, "tcgen05_mma")))
        return source.replace(line, f"      {statement}\n{line}", 1)

    return edit


SHRUNKEN_STAGE = substitute(r"(nv_bfloat16\*\)pool_buf_ptr\)\[\(\(fill_stage_ptr\[0\]) \* \d+", r"\1 * 64")

EDITS: tuple[tuple[str, Case, Edit], ...] = (
    ("not understood", HOPPER, before_mma("goto done;")),
    ("not understood", HOPPER, before_mma("if (mystery(threadIdx.x)) { return; }")),
    ("not understood", HOPPER, before_mma("if (threadIdx.x == drain_stage_ptr[0]) {\n}")),
    ("unknown instruction", HOPPER, before_mma("__threadfence();")),
    ("init fence", HOPPER, without("init_fence")),
    ("init barrier", HOPPER, without("cluster_wait", slice(0, 1))),
    ("exit barrier", HOPPER, without("cluster_wait", slice(1, 2))),
    ("barrier init", HOPPER, without("mbarrier_init", slice(0, 1))),
    ("arrival count", HOPPER, without("arrive", slice(1, 2))),
    ("stage release", HOPPER, without("arrive", slice(0, 1))),
    ("stage bounds", HOPPER, SHRUNKEN_STAGE),
    ("wgmma fence", HOPPER, without("wgmma_fence", slice(1, 2))),
    ("wgmma commit", HOPPER, without("wgmma_commit")),
    ("stage release", HOPPER, without("wgmma_wait", slice(1, 2))),
    ("accumulator read", HOPPER, without("wgmma_wait", slice(1, 2))),
    ("staging reuse", HOPPER, without("bulk_wait_read", slice(2, 3))),
    ("staging reuse", HOPPER, without("named_barrier", slice(0, 1))),
    ("store commit", HOPPER, without("bulk_commit", slice(0, 1))),
    ("exit store wait", HOPPER, without("bulk_wait")),
    ("sum release", SPLIT, without("named_barrier", slice(0, 1))),
    ("parts place", SPLIT, without("remote_write", slice(0, 1))),
    ("turn", PINGPONG, without("mbarrier_wait", slice(1, 2))),
    ("part sum", STREAM_K, substitute(r"if \(\w+\[0\] != \(uint\)0\) \{(\n +alignas)", r"if (1) {\1")),
    ("part place", STREAM_K, substitute(r"(\(\w+\[0\] == 0\)) \? 0 : 1\)", r"\1 ? 1 : 0)")),
    ("warpgroup", HOPPER, substitute(r"warpgroup_sync\(\(\(warp_id_in_cta >> 2\) \+ 1\)\)", "warpgroup_sync(0)")),
    ("accumulator read", BLACKWELL, without("tcgen05_wait_ld")),
    ("mma commit", BLACKWELL, without("tcgen05_commit", slice(0, 1))),
    ("mma commit", BLACKWELL, without("tcgen05_commit", slice(1, 2))),
    ("tcgen05 fence", BLACKWELL, without("fence_before_sync")),
    ("tcgen05 fence", BLACKWELL, without("fence_after_sync", slice(1, 2))),
    ("tensor memory", BLACKWELL, without("tmem_relinquish")),
    ("tensor memory", BLACKWELL, without("tmem_dealloc")),
    ("tensor memory", BLACKWELL, twice("tmem_relinquish")),
    ("tensor memory", BLACKWELL, twice("tmem_dealloc")),
    ("tensor memory", BLACKWELL, swapped("tmem_relinquish", "tmem_dealloc")),
    ("exit store wait", BLACKWELL, without("bulk_wait")),
    ("mma issuer", BLACKWELL, substitute(r"(< 1\) & .*\n +)if \(\w+elect_one_sync_op\(\)\) \{", r"\1if (1) {")),
    ("mma issuer", BLACKWELL, substitute(r"(\(warp_id_in_cta & 3\) < 1\)) & \(.* == 0\)\) \{", r"\1) {")),
    ("accumulator start", BLACKWELL, substitute(r"\(0 < k_1\)\)", "(bool)1)")),
    ("accumulator start", BLACKWELL, substitute(r"\(0 < k_1\)\)", "(0 < drain_stage_ptr[0]))")),
    ("cta group", BLACKWELL, substitute(r"tcgen05\.mma\.cta_group::2", "tcgen05.mma.cta_group::1")),
    ("exit barrier", BLACKWELL, without("cluster_sync", slice(1, 2))),
    ("stage drain", BLACKWELL, last_wait_of_ring),
    ("one question", BLACKWELL_CLC, twice("try_cancel")),
    ("request", BLACKWELL_CLC, without("try_cancel")),
    ("answer release", BLACKWELL_CLC, without("proxy_fence", slice(1, 2))),
    ("answer release", BLACKWELL_CLC, without("answer_read", slice(0, 1))),
)  # fmt: skip


@pytest.mark.parametrize(("rule", "case", "edit"), EDITS, ids=[f"{rule}-{n}" for n, (rule, _, _) in enumerate(EDITS)])
def test_edited_source_breaks_its_rule(rule: str, case: Case, edit: Edit, lowered: Lowered) -> None:
    """Bugs that no template fault plants, cut into the text of a clean kernel."""
    kernel = lowered(case)
    edited = replace(kernel, source=edit(kernel.source))
    assert edited.source != kernel.source
    findings = findings_of(edited, case)
    assert rule in rules_of(findings), findings


def test_every_rule_is_shown_to_fire() -> None:
    """No rule is there that no test has seen firing."""
    shown = {rule for _case, rule in FAULTY} | {rule for rule, _case, _edit in EDITS} | {"launch plan"}
    assert set(RULES) <= shown


def test_launch_that_contradicts_the_config_is_a_finding(lowered: Lowered) -> None:
    """A cluster of one CTA cannot run a kernel of a pair."""
    kernel = lowered(HOPPER)
    alone = replace(kernel, launch=replace(kernel.launch, cluster=(1, 1, 1)))
    assert "launch plan" in rules_of(findings_of(alone, HOPPER))


def test_finding_names_line_and_instruction(lowered: Lowered) -> None:
    """The message leads a person to the place."""
    kernel = lowered(HOPPER)
    first = _calls(kernel.source, "wgmma_fence")[0]
    finding = findings_of(replace(kernel, source=without("wgmma_fence", slice(0, 1))(kernel.source)), HOPPER)[0]
    # the fence stood where the first wgmma is now
    line = kernel.source.split("\n").index(first) + 1
    assert finding.line == line
    assert finding.message.startswith(f"line {line}: wgmma.mma_async.")
    assert "wgmma.fence" in finding.message


def test_helper_is_read_by_its_instruction_and_not_by_its_name() -> None:
    """A helper whose name promises a fence but whose asm has none is unknown."""
    source = (
        "__forceinline__ __device__ void tvm_builtin_ptx_fence_proxy_async() {\n"
        '  asm volatile("membar.cta;" :  :  : "memory");\n}\n'
        "__forceinline__ __device__ void tvm_builtin_x(uint32_t __addr, uint32_t __count) {\n"
        '  asm volatile("mbarrier.init.shared.b64 [%0], %1;" :  : "r"(__addr), "r"(__count) : "memory");\n}\n'
    )
    helpers = read_helpers(source)
    assert helpers["tvm_builtin_ptx_fence_proxy_async"].kind == "unknown"
    assert helpers["tvm_builtin_x"].kind == "mbarrier_init"
    assert helpers["tvm_builtin_x"].parameters == ("addr", "count")


@pytest.mark.parametrize(
    ("statement", "complaint"),
    [
        ("switch (x) {", "cannot read the block"),
        ("while (1) {", "way out"),
        ("int x = f(3);", "unknown function f"),
        ("*p = 3;", "cannot"),
        ("int x = 3 +;", "cannot read"),
    ],
)
def test_form_that_the_reader_does_not_know_is_refused_with_its_line(statement: str, complaint: str) -> None:
    """Silence would mean that the rules passed over it."""
    source = (
        f'extern "C" __global__ void k(const __grid_constant__ CUtensorMap a_map) {{\n  int y = 1;\n  {statement}\n}}\n'
    )
    with pytest.raises(SourceError, match=complaint) as caught:
        read_kernel(source, "k")
    assert caught.value.line == 3


def test_stress_build_with_delays_keeps_the_rules() -> None:
    """Sleeps are no part of the protocol."""
    from kernels.gemm_names import DELAY_POINTS

    kernel = lower(HOPPER.problem, HOPPER.config, SM_COUNT["sm_90a"], delays_ns=dict.fromkeys(DELAY_POINTS, 1024))
    assert "nano_sleep" in kernel.source
    assert findings_of(kernel, HOPPER) == ()
