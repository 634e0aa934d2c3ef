"""From trials to a winner: finalists, the noise, the tie set, and a fixed order inside it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from search_space.memory import FINALISTS
from tuner.records import Evidence, Measurement, Outcome, Ratio, Trial

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


# torch.matmul is the same implementation in every trial; which algorithm `cublaslt_best` is may change with the child.
COMMON_BASELINES = ("torch", "cublaslt_best")
MOST_FINALISTS = FINALISTS  # their verified outputs lie in device memory together
CLOSE = 1.01  # of the best standing of the search: half a percent of noise on each side


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What was chosen.

    winner: the trial
    measurement: the times it was chosen by; None when it was modeled
    tie_set: numbers of the trials that cannot be told from the best, the winner first
    noise: relative gap below which two of them are equal
    """

    winner: Trial
    measurement: Measurement | None
    tie_set: tuple[int, ...]
    noise: float


def finalists(trials: Iterable[Trial]) -> list[Trial]:
    """The MEASURED trials that were verified, fastest first. Where none is left, those that were stopped early.

    All that were measured to the end may have failed a check of the winner; what was slower than they is right.
    """
    verified = [trial for trial in trials if Evidence.NUMERIC in trial.evidence]
    measured = [trial for trial in verified if trial.outcome is Outcome.MEASURED]
    taking_part = measured or [trial for trial in verified if trial.outcome is Outcome.STOPPED_EARLY]
    standings = _standings(taking_part)
    return sorted(taking_part, key=lambda trial: (standings[trial.number], trial.config.key))


def next_batch(
    ranked: Sequence[Trial], *, fewest: int, previous_key: str | None = None
) -> tuple[list[Trial], list[Trial]]:
    """Who is timed again together, and the rest: the fastest few, all that come close, and the previous winner.

    Those that come close take part because the next run of the same job may rank them first: what it then chooses
    should stand in this run's tie set.
    """
    standings = _standings(ranked)
    close = CLOSE * standings[ranked[0].number]

    def takes_part(place: int, trial: Trial) -> bool:
        near = place < MOST_FINALISTS and standings[trial.number] <= close
        return place < fewest or near or trial.config.key == previous_key

    batch = [trial for place, trial in enumerate(ranked) if takes_part(place, trial)]
    return batch, [trial for trial in ranked if trial not in batch]


def _standings(trials: Sequence[Trial]) -> dict[int, float]:
    """Time of each trial over that of a baseline in its own rounds, by number; smaller is faster.

    Absolute times drift by 1 to 2 % within a study, which is more than what separates good configs. Without a baseline
    that all of them have, the times themselves.
    """
    for name in COMMON_BASELINES:
        measured = {trial.number: trial.measurement for trial in trials if trial.measurement is not None}
        if trials and all(name in measurement.baselines_us for measurement in measured.values()):
            return {number: 1 / measurement.ratio(name).median for number, measurement in measured.items()}
    return {trial.number: _time(trial) for trial in trials}


def choose_modeled(trials: Iterable[Trial]) -> Choice | None:
    """The best prediction; equal predictions tie."""
    modeled = [trial for trial in trials if trial.outcome is Outcome.MODELED]
    if not modeled:
        return None
    best_us = min(_time(trial) for trial in modeled)
    ties = sorted((trial for trial in modeled if _time(trial) == best_us), key=lambda trial: trial.config.key)
    return Choice(winner=ties[0], measurement=None, tie_set=tuple(trial.number for trial in ties), noise=0.0)


def choose_measured(
    trials: Sequence[Trial],
    measurements: Mapping[int, Measurement],
    *,
    aa_ratio: Ratio | None,
    paired: bool,
    previous_key: str | None = None,
) -> Choice | None:
    """The first of the tie set by config key, or the previous winner when it is in the tie set.

    `measurements` holds the times to choose by, by trial number; trials without one do not take part. `paired` says
    whether they were taken interleaved, so that their rounds pair up. A trial ties with the fastest when the 95 %
    interval of its time over the fastest reaches down to 1 plus the noise; the noise is how far the interval of the
    A/A pair strays from 1.
    """
    taking_part = [trial for trial in trials if trial.number in measurements]
    if not taking_part:
        return None
    noise = 0.0 if aa_ratio is None else aa_ratio.strays
    best = min(taking_part, key=lambda trial: (measurements[trial.number].median_us(), trial.config.key))
    ties = [
        trial
        for trial in taking_part
        if trial is best
        or _slower_at_least(measurements[trial.number], measurements[best.number], paired=paired) <= 1 + noise
    ]
    ties.sort(key=lambda trial: (trial.config.key != previous_key, trial.config.key))
    return Choice(
        winner=ties[0],
        measurement=measurements[ties[0].number],
        tie_set=tuple(trial.number for trial in ties),
        noise=noise,
    )


def why_none_worked(trials: Sequence[Trial]) -> str:
    """The commonest failures with an example each, for a study without a winner.

    What failed in the final or in a check of the winner has its outcome by now; the rest of those that were measured
    had no final.
    """
    if not trials:
        return "no config was tried"
    failed = [trial for trial in trials if not trial.outcome.counts_against_budget]
    if not failed:
        return f"{len(trials)} configs were measured, and none could be timed again in a final"
    counts = Counter(trial.outcome for trial in failed)
    examples = {trial.outcome: trial.reason for trial in reversed(failed)}
    parts = [f"{count} {outcome} (such as: {examples[outcome]})" for outcome, count in counts.most_common(3)]
    return f"none of {len(trials)} configs worked: {'; '.join(parts)}"


def _slower_at_least(theirs: Measurement, best: Measurement, *, paired: bool) -> float:
    """Lower end of the 95 % interval of theirs over best; without pairs, from the two intervals."""
    if paired and len(theirs.samples_us) == len(best.samples_us):
        return Ratio.of_pairs(theirs.samples_us, best.samples_us).low
    return theirs.interval_us()[0] / best.interval_us()[1]


def _time(trial: Trial) -> float:
    time_us = trial.time_us
    assert time_us is not None, f"trial {trial.number} ended as {trial.outcome} without a time"
    return time_us
