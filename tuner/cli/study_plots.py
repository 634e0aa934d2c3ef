"""`show STUDY --plots DIR`: what a study found out about its knobs, as pictures."""

from __future__ import annotations

from itertools import combinations
from math import log
from pathlib import Path
from typing import TYPE_CHECKING

from pictures import study as drawn
from search_space.knob_effects import FEWEST_TRIALS, effects, pair
from tuner.cli.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pictures.svg import Picture
    from tuner.answers import Study, Trial

MOST_KNOBS = 9  # that are drawn as slices
PAIRED_KNOBS = 3  # each with each


def study_pictures(study: Study, trials: Sequence[Trial]) -> dict[str, Picture]:
    """Pictures by file name. Those of knobs need a handful of timed trials, and are left out where there are fewer."""
    timed = [(trial["config"], time_us) for trial in trials if (time_us := _time(trial, study)) is not None]
    found: dict[str, Picture] = {}
    if study["coverage"]:
        found["coverage.svg"] = drawn.coverage(study["coverage"])
    if turned_away := [trial["reason"] for trial in trials if trial["reason"] and _time(trial, study) is None]:
        found["reasons.svg"] = drawn.reasons(turned_away)
    if len(timed) < FEWEST_TRIALS:
        return found
    from tuner.search.importance import importances

    method, shares = importances([(config, log(time_us)) for config, time_us in timed])
    if not shares:
        return found
    known = {effect.name: effect for effect in effects(timed)}
    ranked = sorted(shares, key=lambda name: -shares[name])
    found["importance.svg"] = drawn.importance(shares, method=method, trials=len(timed))
    found["slices.svg"] = drawn.slices([known[name] for name in ranked[:MOST_KNOBS]], timed)
    if len(ranked) > 1:
        chosen = combinations(ranked[:PAIRED_KNOBS], 2)
        found["pairs.svg"] = drawn.pairs([pair(timed, one, other) for one, other in chosen])
    return found


def _time(trial: Trial, study: Study) -> float | None:
    return trial["modeled_us"] if study["mode"] == "model" else trial["median_us"]


def write_pictures(found: dict[str, Picture], folder: str) -> None:
    """Raises UsageError for a folder that cannot be written."""
    try:
        for name, picture in found.items():
            picture.write(Path(folder) / name)
    except OSError as error:
        raise UsageError(f"cannot write {error.filename or folder}: {error.strerror}") from error
