"""GPU architectures that have a template: the limits one CTA and one SM must respect."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Arch:
    """Limits of one architecture.

    name: compiler target, with the suffix that unlocks wgmma or tcgen05
    compute_capability: (major, minor) that a device must report to run code of this target
    smem_bytes: dynamic shared memory one CTA may use
    tmem_columns: 32-bit columns of tensor memory of one SM; 0 where there is none
    registers: 32-bit registers of one SM
    max_registers_per_thread: limit of the instruction encoding
    mma_flops_per_clock: dense 16-bit tensor-core FLOP of one SM in one clock
    """

    name: str
    compute_capability: tuple[int, int]
    smem_bytes: int
    tmem_columns: int
    registers: int
    max_registers_per_thread: int
    mma_flops_per_clock: int


# Sources: CUDA C++ Programming Guide, table of compute capabilities (227 KB dynamic shared memory, 64 K registers);
# PTX ISA, tensor memory (512 columns); H100 and B200 data sheets, dense BF16 rate / (SMs x boost clock).
SM_90A = Arch(
    name="sm_90a",
    compute_capability=(9, 0),
    smem_bytes=232448,
    tmem_columns=0,
    registers=65536,
    max_registers_per_thread=255,
    mma_flops_per_clock=4096,
)
SM_100A = Arch(
    name="sm_100a",
    compute_capability=(10, 0),
    smem_bytes=232448,
    tmem_columns=512,
    registers=65536,
    max_registers_per_thread=255,
    mma_flops_per_clock=8192,
)

ARCHES: dict[str, Arch] = {arch.name: arch for arch in (SM_90A, SM_100A)}


def arch_named(name: str) -> Arch:
    """Raises ConfigError naming the architectures there are."""
    try:
        return ARCHES[name]
    except KeyError:
        raise ConfigError(f"unknown arch {name!r}: use one of {', '.join(ARCHES)}", knob="arch") from None


def arch_of_capability(major: int, minor: int) -> Arch | None:
    """The architecture whose code a device of this compute capability runs, or None."""
    return next((arch for arch in ARCHES.values() if arch.compute_capability == (major, minor)), None)
