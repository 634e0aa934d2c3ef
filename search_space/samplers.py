"""Names of the samplers, and what each needs beyond the tuner's own packages. Imports none of them."""

from __future__ import annotations

from importlib.util import find_spec

LEARNED = "learned"
DEFAULT_SAMPLER = LEARNED  # the best in the table of replays, docs/guides/search.md
# Where several modules are named, all are needed; the extra `search` brings them.
NEEDED_MODULES: dict[str, tuple[str, ...]] = {
    LEARNED: (),  # LightGBM makes it better, see tuner.search.cost_model; without it the rest is at work
    "tpe": (),
    "gp": ("torch", "scipy"),
    "cmaes": ("cmaes",),
    "random": (),
    "brute": (),
}
# Of the best time: a trial that is expected to gain less is not worth its while. Half of what tells two finalists apart
# (A/A pairs, H200); what it costs by replay stands in docs/guides/search.md.
WORTH_A_TRIAL = 0.001
MOST_WEIGHED = 4.0  # times that, for a problem that matters less than the others of its job; or a part of it
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


def worth_a_trial(weight: float, mean_weight: float) -> float:
    """Expected gain, as a share of the best time, below which a study of a job ends.

    All studies of a job end at the same weight times gain. So its trials go where weight times expected gain is
    largest, whichever study is run first. A problem that matters little ends sooner, but never without a search.
    """
    factor = min(MOST_WEIGHED, max(1 / MOST_WEIGHED, mean_weight / weight))
    return float(f"{WORTH_A_TRIAL * factor:.2g}")
