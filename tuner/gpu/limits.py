"""The time that no kernel of a device can beat. A measurement below it is a mistake of the clock or of the kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernels.devices import DeviceProfile
    from kernels.problem import GemmProblem


def impossible(
    samples_us: tuple[float, ...],
    problem: GemmProblem,
    profile: DeviceProfile,
    pool_bytes: int,
    *,
    seen_mhz: float = 0.0,
) -> str:
    """Why some sample cannot be true, or nothing.

    profile: of the live device, with the highest clock that it allows
    pool_bytes: data that the launches rotate over
    seen_mhz: highest SM clock seen during the measurement, 0 when none was read. It raises the limit of a card that
        runs above what it says it allows, and never lowers it: a reading is one moment, and on a card that throttles
        now and then, a burst may run faster than the moment after it
    """
    clock_mhz = max(float(profile.clock_mhz), seen_mhz)
    best = min(samples_us)
    if not best > 0:
        return f"a sample of {best:g} us: a time is positive"
    compute_us = problem.flops / (profile.sm_count * profile.arch.mma_flops_per_clock * clock_mhz)
    if best < compute_us:
        return (
            f"a sample of {best:.3f} us is below the {compute_us:.3f} us that {profile.sm_count} SMs need at "
            f"{profile.arch.mma_flops_per_clock} FLOP a clock and {clock_mhz:.0f} MHz"
        )
    memory_us = _memory_us(problem, profile, pool_bytes)
    if best < memory_us:
        return (
            f"a sample of {best:.3f} us is below the {memory_us:.3f} us that {problem.min_bytes} B need at "
            f"{profile.bandwidth_bytes_per_s / 1e12:.2f} TB/s, less what L2 holds"
        )
    return ""


def _memory_us(problem: GemmProblem, profile: DeviceProfile, pool_bytes: int) -> float:
    """Operands that fit L2 have no limit; of a larger pool, the part that L2 can hold need not be read again."""
    if problem.min_bytes <= profile.l2_bytes:
        return 0.0
    missing = max(0.0, 1.0 - profile.l2_bytes / max(pool_bytes, problem.min_bytes))
    return missing * problem.min_bytes / profile.bandwidth_bytes_per_s * 1e6
