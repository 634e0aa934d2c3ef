"""How far cards of one name differ: the vendor library's kernel for the same product, timed on each of them."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tuner.records import Trial

FEWEST_TRIALS = 3  # on a card, for its median to say anything


@dataclass(frozen=True, kw_only=True, slots=True)
class CardSpread:
    """Cards that measured one study.

    vendor_us: median time of the vendor library on each card, by its UUID
    """

    vendor_us: Mapping[str, float]

    @property
    def spread(self) -> float:
        """How much slower the slowest card is than the fastest: 0.01 is 1 %."""
        return max(self.vendor_us.values()) / min(self.vendor_us.values()) - 1

    def __str__(self) -> str:
        return (
            f"measured on {len(self.vendor_us)} cards, between which the vendor's kernel differs by {self.spread:.1%}"
        )


def card_spread(trials: Iterable[Trial]) -> CardSpread | None:
    """The spread between the cards of a study's trials; None where fewer than two cards measured enough of them."""
    times_us: dict[str, list[float]] = {}
    for trial in trials:
        measurement = trial.measurement
        if measurement is None or not measurement.baselines_us:
            continue
        name = min(measurement.baselines_us)  # any will do, as long as it is the same on each card
        times_us.setdefault(measurement.environment.gpu_uuid, []).append(measurement.baseline_median_us(name))
    vendor_us = {uuid: median(times) for uuid, times in times_us.items() if len(times) >= FEWEST_TRIALS}
    return CardSpread(vendor_us=vendor_us) if len(vendor_us) > 1 else None
