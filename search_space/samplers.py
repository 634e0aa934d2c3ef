"""Names of the samplers, and what each needs beyond the tuner's own packages. Imports none of them."""

from __future__ import annotations

from importlib.util import find_spec

LEARNED = "learned"
DEFAULT_SAMPLER = "tpe"
# Where several modules are named, all are needed; the extra `search` brings them.
NEEDED_MODULES: dict[str, tuple[str, ...]] = {
    LEARNED: (),  # LightGBM makes it better, see tuner.search.cost_model; without it the rest is at work
    "tpe": (),
    "gp": ("torch", "scipy"),
    "cmaes": ("cmaes",),
    "random": (),
    "brute": (),
}
SAMPLERS = tuple(NEEDED_MODULES)


def missing_modules(sampler: str) -> tuple[str, ...]:
    """Modules that the sampler needs and that are not installed here. Raises KeyError for an unknown sampler."""
    return tuple(module for module in NEEDED_MODULES[sampler] if find_spec(module) is None)


def unusable_reason(sampler: str) -> str | None:
    """Why the sampler cannot be used here, with what to do; None when it can."""
    missing = missing_modules(sampler)
    if not missing:
        return None
    usable = ", ".join(name for name in SAMPLERS if not missing_modules(name))
    return (
        f"sampler {sampler!r} needs {' and '.join(missing)}, which the tuner's machine lacks: install "
        f"'gemm-tuner[search]' there, or use one of {usable}"
    )
