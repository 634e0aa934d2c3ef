"""The reference of knobs: meaning, choices, laws, and what each was measured to do."""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, Any

from docs import knob_effects
from docs.markdown import NOTE, code, field_lines, table
from kernels.config import CONFIG_CLASSES
from kernels.errors import ConfigError
from kernels.rules import RULES
from search_space.space import choices, forms
from search_space.starting import PRESETS, preset

if TYPE_CHECKING:
    from collections.abc import Sequence

SEED = 0
DRAWS = 5_000


def knobs() -> str:
    """Every knob: what it means, its default and choices, and the rules that bind it."""
    lines = [
        "# Knobs",
        NOTE,
        "",
        "A config is one value for each knob of its architecture. *Choices* are what a study draws from; a rule may",
        "allow more, and `gemm-tuner explain CONFIG` says which rule an illegal config breaks. What single knobs do at",
        "chosen shapes, and why, stands in [the template](../explanation/template.md).",
        "",
    ]
    for arch in CONFIG_CLASSES:
        default = CONFIG_CLASSES[arch]()
        drawn = _searched(arch)
        meaning = field_lines(CONFIG_CLASSES[arch])
        rows = [
            (code(name), meaning.get(name, ""), code(getattr(default, name)), _ranges(drawn.get(name, ())))
            for name in CONFIG_CLASSES[arch].knobs()
        ]
        lines += [f"## {arch}", "", *table(("knob", "meaning", "default", "choices"), rows), ""]
        lines += [f"### Laws of {arch}", "", "Each with a case that it refuses, in the words of the rule.", ""]
        lines += [*table(("knobs", "refused"), _laws(arch)), "", *_effects(arch)]
    lines += ["## Presets", "", *table(("name", "config"), [(code(name), _preset(name)) for name in PRESETS]), ""]
    return "\n".join(lines)


def _searched(arch: str) -> dict[str, tuple[Any, ...]]:
    """The values of each knob that some form of the template takes: the others are legal, but no study asks them."""
    every = list(forms(arch, choices(arch)))
    return {
        knob: tuple(value for value in values if any(value in form[knob] for form in every))
        for knob, values in choices(arch).items()
    }


def _effects(arch: str) -> list[str]:
    """What each knob was measured to do."""
    lines = [f"### Measured on {arch}", ""]
    landscapes = [one for one in knob_effects.recorded() if one.arch == arch]
    if not landscapes:
        modeled = "[modeled](../explanation/modeled-and-measured.md)"
        return [*lines, f"Nothing: no GPU of this kind was at hand. Its times are {modeled}.", ""]
    configs = sum(len(one.times_us) for one in landscapes)
    devices = " and ".join(sorted({one.device for one in landscapes}))
    return [
        *lines,
        f"On an {devices}, {configs} configs of {len(landscapes)} problems, each timed",
        "([the landscapes](../guides/search.md#landscapes)); `make docs-generated` computes the table again.",
        "",
        "- *Alone*: configs that differ in this knob only. How much longer the slowest takes than the fastest: median,",
        "  most, and (how many such sets there are).",
        "- *A value costs*: how much longer the best config with this value takes than the best of the landscape, when",
        "  everything else may be chosen anew: median, most, and (how many landscapes hold the value). A value that",
        "  costs nothing on one problem and much on another is why each problem is tuned.",
        "",
        *table(("knob", "alone", "a value costs"), knob_effects.rows(CONFIG_CLASSES[arch].knobs(), landscapes)),
        "",
        "A landscape is bounded: a depth is mostly the deepest that fits its tile, and the epilogue is varied beside",
        "few tiles only. What a value of `pipe_depth` or `epi_n` costs is therefore also what the tiles cost that go",
        "with it; the column *alone* does not mix the two. `l2_group_size` is the usual one of the tile.",
        "",
        f"Problems: {', '.join(one.problem for one in landscapes)}.",
        "",
    ]


def _preset(name: str) -> str:
    config = preset(name)
    return f"{config.arch.name}: " + ", ".join(f"{knob} {value}" for knob, value in config.to_dict().items())


def _ranges(values: Sequence[Any]) -> str:
    """`2 to 16` for 2, 3, ... 16; steps are named."""
    if len(values) < 4 or not all(isinstance(value, int) for value in values):
        return ", ".join(map(str, values)) or "one value"
    parts, start = [], 0
    while start < len(values):
        end = start + 1
        step = values[end] - values[start] if end < len(values) else 0
        while end + 1 < len(values) and values[end + 1] - values[end] == step:
            end += 1
        if end - start < 3:
            parts.append(str(values[start]))
            start += 1
            continue
        parts.append(f"{values[start]} to {values[end]}" + (f" in steps of {step}" if step > 1 else ""))
        start = end + 1
    return ", ".join(parts)


def _laws(arch: str) -> list[tuple[str, str]]:
    """One refusal of each rule, found by trying configs near the legal ones; the search is the same each time."""
    rng, found = random.Random(SEED), dict[int, str]()
    values = {name: _widened(choices(arch).get(name, (getattr(CONFIG_CLASSES[arch](), name),))) for name in
              CONFIG_CLASSES[arch].knobs()}  # fmt: skip
    for _ in range(DRAWS):
        try:
            config = CONFIG_CLASSES[arch](**{name: rng.choice(some) for name, some in values.items()})
        except ConfigError:
            continue
        # In the order of the rules: a later one may count on those before it.
        broken = next(((place, reason) for place, rule in enumerate(RULES[arch]) if (reason := rule(config))), None)
        if broken:
            found.setdefault(*broken)
        if len(found) == len(RULES[arch]):
            break
    return [(", ".join(map(code, _named(arch, found[place]))), found[place]) for place in sorted(found)]


def _widened(values: Sequence[Any]) -> list[Any]:
    """The choices, and for numbers a little beyond them."""
    numbers = [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
    return [*values, max(numbers) + 1, max(numbers) * 2, min(numbers) + 1] if numbers else list(values)


def _named(arch: str, reason: str) -> list[str]:
    words = set(re.findall(r"[a-z_0-9]+", reason))
    shared = {"pipe_depth", "blk_m", "blk_n", "blk_k", "num_consumers", "epi_n", "epi_stages"}
    named = [name for name in CONFIG_CLASSES[arch].knobs() if name in words]
    return named or [name for name in CONFIG_CLASSES[arch].knobs() if name in shared]
