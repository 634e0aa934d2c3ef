"""A model of times learned from stored measurements of all problems, and its correction by the trials of one study.

Times are modeled as logarithms, relative to the performance model: what is learned is where that is wrong. Gradient-
boosted trees carry over what other problems showed; several of them, each grown on another draw of the problems, say
by how much they may be off. A study then has its own correction: a Gaussian process over the difference between its
trials and the trees. Without stored measurements, or without LightGBM, the correction alone is at work.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from dataclasses import dataclass
from itertools import product
from math import log
from typing import TYPE_CHECKING, Any

import numpy as np

from search_space.features import NAMES, Features

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Vector = NDArray[np.float64]

SCHEMA = 1
MEMBERS = 6  # trees forests of a model
ROUNDS = 160
MIN_ROWS = 60  # stored times below which nothing can be learned
SMALLEST_SD = 0.03  # of a prediction for an unknown problem, however much the members agree
PRIOR_SD = 0.15  # of the performance model's error, H200, 830 trials of 27 shapes
OFFSET_SD = 0.10  # of what all configs of a problem share
NOISE_SD = 0.006  # of a measured time
# Of the study's correction: how far it may go, over which distance between knobs it carries, and what it leaves.
SCALES = (0.5, 1.0, 2.0)  # times what the prior may be off
LENGTHS = (0.7, 1.4, 2.8)
NUGGETS = (0.01, 0.03)

PARAMETERS: dict[str, Any] = {
    "objective": "regression",
    "learning_rate": 0.06,
    "num_leaves": 15,
    "min_data_in_leaf": 8,
    "feature_fraction": 0.6,
    "bagging_fraction": 0.8,
    "bagging_freq": 1,
    "lambda_l2": 1.0,
    "deterministic": True,
    "force_row_wise": True,
    "num_threads": 1,
    "verbosity": -1,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One stored time.

    features: of the config for its problem
    time_us: what was measured
    group: key of problem and device: the unit that a member is trained with or without
    """

    features: Features
    time_us: float
    group: str


def is_available() -> bool:
    """Whether LightGBM is installed."""
    try:
        import lightgbm  # noqa: F401
    except (ImportError, OSError):
        return False
    return True


class CostModel:
    """Trees that estimate log(time / performance model). Immutable; its text is its snapshot."""

    def __init__(self, texts: Sequence[str], *, rows: int, groups: int) -> None:
        """`texts` are LightGBM's own form of the members."""
        import lightgbm

        self._texts = tuple(texts)
        self._members = [lightgbm.Booster(model_str=text) for text in texts]
        self.rows, self.groups = rows, groups

    @classmethod
    def train(cls, samples: Sequence[Sample], *, seed: int = 0) -> CostModel | None:
        """None where there is too little to learn from, or no LightGBM. The same samples give the same model."""
        groups = sorted({sample.group for sample in samples})
        if len(samples) < MIN_ROWS or len(groups) < 2 or not is_available():
            return None
        inputs = np.array([sample.features.values for sample in samples])
        outputs = np.array([log(sample.time_us / sample.features.model_us) for sample in samples])
        place = {group: index for index, group in enumerate(groups)}
        of_group = np.array([place[sample.group] for sample in samples])
        # What matters is who is fastest: a config that takes four times as long may be off by far.
        weights = _weights(np.array([log(sample.time_us) for sample in samples]), of_group)
        texts = [_member(inputs, outputs, of_group, weights, seed + number) for number in range(MEMBERS)]
        return cls(texts, rows=len(samples), groups=len(groups))

    def predict(self, inputs: Vector) -> tuple[Vector, Vector]:
        """Mean and standard deviation of log(time / performance model) for rows of feature values."""
        each = np.array([member.predict(inputs, num_threads=1) for member in self._members])
        return each.mean(axis=0), np.sqrt(each.var(axis=0) + SMALLEST_SD**2)

    def contributions(self, inputs: Vector) -> Vector:
        """SHAP values of each feature for each row, the mean of the members; without the constant."""
        each = [member.predict(inputs, pred_contrib=True, num_threads=1) for member in self._members]
        return np.asarray(np.mean(each, axis=0)[:, :-1])

    def dump(self) -> bytes:
        """The snapshot: what `load` makes an equal model of."""
        content = {"schema": SCHEMA, "names": NAMES, "rows": self.rows, "groups": self.groups, "members": self._texts}
        return gzip.compress(json.dumps(content, sort_keys=True).encode(), mtime=0)

    @property
    def sha256(self) -> str:
        """Of the snapshot."""
        return hashlib.sha256(self.dump()).hexdigest()

    @classmethod
    def load(cls, data: bytes) -> CostModel:
        """Raises ValueError for a snapshot of another version: its features are not those of this one."""
        content = json.loads(gzip.decompress(data))
        if content.get("schema") != SCHEMA or tuple(content.get("names", ())) != NAMES:
            raise ValueError("the snapshot of the learned model is of another version of this program")
        return cls(content["members"], rows=content["rows"], groups=content["groups"])


def _weights(log_times: Vector, of_group: NDArray[np.int64]) -> Vector:
    """1 for the fastest config of a problem, a quarter for one that takes twice as long; problems count alike."""
    weights = np.empty(len(log_times))
    for group in range(int(of_group.max()) + 1):
        at = of_group == group
        slower = np.exp(log_times[at] - log_times[at].min())
        weight = slower**-2.0
        weights[at] = weight / weight.sum()
    return np.asarray(weights * len(weights) / weights.sum())


def _member(inputs: Vector, outputs: Vector, of_group: NDArray[np.int64], weights: Vector, seed: int) -> str:
    """Grown without a quarter of the problems, so that members disagree where a problem is unlike the others."""
    import lightgbm

    groups = int(of_group.max()) + 1
    left_out = np.random.default_rng(seed).permutation(groups)[: groups // 4]
    kept = ~np.isin(of_group, left_out)
    data = lightgbm.Dataset(inputs[kept], outputs[kept], weight=weights[kept], feature_name=list(NAMES))
    return str(lightgbm.train({**PARAMETERS, "seed": seed}, data, num_boost_round=ROUNDS).model_to_string())


@dataclass(frozen=True, slots=True)
class Belief:
    """What is expected of configs: mean and standard deviation of the logarithm of their times."""

    mean: Vector
    sd: Vector


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a study's correction: how far it goes, over which distance between knobs it carries, and what it leaves."""

    scale: float
    length: float
    nugget: float


class StudyModel:
    """Prior of each config, corrected by the trials of one study.

    shape: of the correction, the one that makes the trials most likely
    """

    def __init__(self, knobs: Vector, log_times: Vector, prior: Belief, shape: Shape | None = None) -> None:
        """`knobs` of the configs that were timed, a row each; `prior` is what was expected of them."""
        self._knobs, self._rest, self._prior_sd = knobs, log_times - prior.mean, prior.sd
        distance = _distances(knobs, knobs)
        self.shape = shape or _fitted(distance, prior.sd, self._rest)
        covariance = _covariance(distance, prior.sd, prior.sd, self.shape) + _noise(len(knobs), self.shape)
        self._factor = np.linalg.cholesky(covariance)
        self._weights = np.linalg.solve(self._factor.T, np.linalg.solve(self._factor, self._rest))

    def believe(self, knobs: Vector, prior: Belief) -> Belief:
        """What is expected of other configs, now that the trials are known."""
        across = _covariance(_distances(self._knobs, knobs), self._prior_sd, prior.sd, self.shape)
        mean = prior.mean + across.T @ self._weights
        explained = np.linalg.solve(self._factor, across)
        variance = OFFSET_SD**2 + self.shape.scale**2 * prior.sd**2 - (explained**2).sum(axis=0)
        return Belief(mean, np.sqrt(np.maximum(variance, NOISE_SD**2)))


def _distances(left: Vector, right: Vector) -> Vector:
    square = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1)[None, :] - 2 * left @ right.T
    return np.asarray(np.sqrt(np.maximum(square, 1e-12)))


def _covariance(distance: Vector, left_sd: Vector, right_sd: Vector, shape: Shape) -> Vector:
    """What two configs share: the problem's offset, and more the closer their knobs are.

    A config of which little was known before may be corrected by more.
    """
    near = np.exp(-distance / shape.length)
    return np.asarray(OFFSET_SD**2 + shape.scale**2 * np.outer(left_sd, right_sd) * near)


def _noise(count: int, shape: Shape) -> Vector:
    return np.asarray(np.diag(np.full(count, shape.nugget**2 + NOISE_SD**2)))


def _fitted(distance: Vector, prior_sd: Vector, rest: Vector) -> Shape:
    """The shape that makes the trials most likely. All are tried at once: one by one took half of a suggestion."""
    shapes = [Shape(*values) for values in product(SCALES, LENGTHS, NUGGETS)]
    covariances = np.stack(
        [_covariance(distance, prior_sd, prior_sd, shape) + _noise(len(rest), shape) for shape in shapes]
    )
    factors = np.linalg.cholesky(covariances)
    white = np.linalg.solve(factors, np.broadcast_to(rest[:, None], (len(shapes), len(rest), 1)))[..., 0]
    log_determinants = np.log(np.diagonal(factors, axis1=1, axis2=2)).sum(axis=1)
    return shapes[int(np.argmax(-0.5 * (white**2).sum(axis=1) - log_determinants))]


def prior_belief(model: CostModel | None, asked: Sequence[Features]) -> Belief:
    """What is expected before the study's first trial."""
    base = np.array([log(one.model_us) for one in asked])
    if model is None:
        return Belief(base, np.full(len(asked), PRIOR_SD))
    mean, sd = model.predict(np.array([one.values for one in asked]))
    return Belief(base + mean, sd)


def expected_improvement(belief: Belief, best_log_time: float) -> Vector:
    """Expected gain over the best, as a share of its time (a difference of logarithms)."""
    z = (best_log_time - belief.mean) / belief.sd
    density = np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi)
    return np.asarray(belief.sd * (z * _normal_cdf(z) + density))


def _normal_cdf(z: Vector) -> Vector:
    """Abramowitz and Stegun 7.1.26: to 1.5e-7, without another package."""
    x = np.abs(z) / np.sqrt(2.0)
    t = 1.0 / (1.0 + 0.3275911 * x)
    poly = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    erf = 1.0 - poly * np.exp(-(x**2))
    return np.asarray(0.5 * (1.0 + np.sign(z) * erf))
