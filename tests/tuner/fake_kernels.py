"""Compile functions with the signature of the real one. Apart from `fake_compilers`, as their imports take a while: a
worker pays for them when it starts, not within the time limit of its first job.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kernels.errors import CompileError
from tests.tuner.fake_compilers import do_abort, do_shot, do_sleep
from tuner.engine.base import CompileJob
from tuner.engine.fake import fake_kernel


def compile_kernel(problem: Any, config: Any, sm_count: int) -> Any:
    """Compiles; the pipeline depth says what goes wrong."""
    if config.pipe_depth == 9:
        do_abort()
    if config.pipe_depth == 10:
        do_sleep()
    if config.pipe_depth == 11:
        raise CompileError("nvcc for sm_90a failed: bad", log_tail="line 7: error")
    job = CompileJob(problem=problem, config=config, sm_count=sm_count)
    return fake_kernel(job, spill_bytes=64 if config.pipe_depth == 12 else 0)


def compile_shot_once(problem: Any, config: Any, sm_count: int) -> Any:
    """The first compile of each pipeline depth is killed from outside; the flags lie in FAKE_COMPILER_STATE."""
    flag = Path(os.environ["FAKE_COMPILER_STATE"]) / f"shot-{config.pipe_depth}"
    if not flag.exists():
        flag.touch()
        do_shot()
    return compile_kernel(problem, config, sm_count)
