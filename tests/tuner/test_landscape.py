"""Landscapes: the bounded space, the file, and a recording that is cut and goes on."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from kernels.devices import profile_named
from kernels.problem import GemmProblem
from search_space.checks import rejection
from search_space.starting import starting_configs
from tests.tuner import synthetic
from tests.tuner.support import fake
from tuner import landscape
from tuner.engine.base import EngineError
from tuner.landscape import LandscapeError
from tuner.landscape_record import RecordOptions, record
from tuner.landscape_space import SIZE, bounded_space, measuring_order
from tuner.records import Outcome

if TYPE_CHECKING:
    from pathlib import Path

    from tuner.engine.base import EvaluateJob

H200 = profile_named("h200")
DECODE = GemmProblem(m=16, n=4096, k=4096)


def test_space_is_the_same_each_time_and_holds_what_is_known() -> None:
    """408 legal configs, drawn by the problem alone; the known ones are in it and are measured first."""
    known = starting_configs(DECODE, H200)
    space = bounded_space(DECODE, H200, known)
    assert space == bounded_space(DECODE, H200, known)
    assert len(space.configs) == SIZE == len(set(space.configs))
    assert set(known) <= set(space.configs)
    assert all(rejection(DECODE, config, H200) is None for config in space.configs)
    order = measuring_order(space, DECODE)
    assert tuple(order[: len(known)]) == known
    assert sorted(order, key=lambda config: config.key) == list(space.configs)


def test_space_holds_bad_configs_too() -> None:
    """No estimate chose them: the model expects the middle one to take half as long again as the best, or longer."""
    problem = GemmProblem(m=512, n=4096, k=4096)
    times = sorted(synthetic.predict(problem, c, H200).time_us for c in bounded_space(problem, H200).configs)
    assert times[len(times) // 2] > 1.5 * times[0]


def test_file_is_read_as_it_was_written_packed_or_not(tmp_path: Path) -> None:
    """Packing loses nothing; unpacking gives the plain file back."""
    packed = synthetic.write(tmp_path, "512x4096x4096", size=50)
    content = landscape.read(packed)
    assert (len(content.configs), len(content.rows), content.missing) == (50, 50, ())
    assert "made up" in content.synthetic
    plain = landscape.unpack(packed)
    assert landscape.read(plain) == content
    data = packed.read_bytes()
    assert landscape.pack(plain).read_bytes() == data


def test_line_that_was_cut_short_is_left_out_and_noise_is_refused(tmp_path: Path) -> None:
    """A recording that was killed ends within a line; anything else that is wrong is named."""
    plain = landscape.unpack(synthetic.write(tmp_path, "512x4096x4096", size=50))
    text = plain.read_text()
    plain.write_text(text[:-20])
    assert len(landscape.read(plain).rows) == 49
    plain.write_text(text.replace('"index": 7,', '"index": seven,'))
    with pytest.raises(LandscapeError, match="line 9, is not JSON"):
        landscape.read(plain)
    plain.write_text('{"kind": "other"}\n')
    with pytest.raises(LandscapeError, match="no landscape"):
        landscape.read(plain)


def test_times_of_two_sessions_are_brought_to_one_scale(tmp_path: Path) -> None:
    """A card that was 2 % slower on another day is told by the vendor library, which was too."""
    plain = landscape.unpack(synthetic.write(tmp_path, "512x4096x4096", size=50))
    before = landscape.read(plain).times_us
    lines = [json.loads(line) for line in plain.read_text().splitlines()]
    for line in lines[1:20]:
        line["session"] = "another day"
        line["samples_us"] = [1.02 * sample for sample in line["samples_us"]]
        line["baselines_us"] = {name: [1.02 * s for s in each] for name, each in line["baselines_us"].items()}
    plain.write_text("".join(json.dumps(line) + "\n" for line in lines))
    after = landscape.read(plain).times_us
    assert after == pytest.approx(before, rel=1e-3)


def _record(folder: Path, engine: object, wall_s: float = 60.0) -> landscape.Landscape:
    said: list[str] = []
    (file,) = record(engine, folder, [(DECODE, ())], RecordOptions(ahead=8, wall_s=wall_s), say=said.append)  # type: ignore[arg-type]
    assert said
    return landscape.read(file)


def test_recording_keeps_every_outcome_and_times_the_fastest_again(tmp_path: Path) -> None:
    """One row a config; hopeless ones were stopped early and have a time all the same; eight finalists."""
    content = _record(tmp_path, fake())
    assert content.missing == ()
    outcomes = Counter(row.outcome for row in content.rows.values())
    assert set(outcomes) == {Outcome.MEASURED, Outcome.STOPPED_EARLY}
    assert outcomes[Outcome.STOPPED_EARLY] > outcomes[Outcome.MEASURED]
    assert len(content.times_us) == len(content.configs)
    assert len(content.finals) == 8
    assert all(row.environment in content.environments for row in content.rows.values())
    fastest = min(content.times_us, key=lambda index: content.times_us[index])
    assert fastest in content.finals


class _Cut(Exception):
    """The machine goes away."""


def test_recording_that_was_cut_goes_on_and_measures_nothing_twice(tmp_path: Path) -> None:
    """Killed in the middle, then finished by another engine: each config was evaluated once."""
    evaluated: list[str] = []

    def counting(fail_after: int | None) -> object:
        engine = fake()
        evaluate = engine.evaluate

        def counted(job: EvaluateJob) -> object:
            if fail_after is not None and len(evaluated) >= fail_after:
                raise _Cut
            evaluated.append(job.config.key)
            return evaluate(job)

        engine.evaluate = counted  # type: ignore[method-assign, assignment]
        return engine

    with pytest.raises(_Cut):
        _record(tmp_path, counting(100))
    (packed,) = tmp_path.iterdir()
    cut = landscape.read(packed)
    assert 90 <= len(cut.rows) <= 100
    content = _record(tmp_path, counting(None))
    assert content.missing == ()
    assert content.configs == cut.configs
    assert {index: content.rows[index] for index in cut.rows} == dict(cut.rows)
    again = Counter(evaluated)
    unwritten = 100 - len(cut.rows)  # handed over when the machine went away
    assert sum(count - 1 for count in again.values()) == unwritten


def test_recording_stops_in_time(tmp_path: Path) -> None:
    """With no time at all nothing is begun, and the file is there to go on with."""
    assert len(_record(tmp_path, fake(), wall_s=0.0).rows) == 0


def test_winner_that_was_published_since_is_added_and_measured(tmp_path: Path) -> None:
    """A landscape has to hold what is known to be best; the configs that it was begun with stay where they are."""
    folder = tmp_path / "landscapes"
    _record(folder, fake(), wall_s=0.0)
    content = landscape.read(next(folder.iterdir()))
    other = next(c for c in bounded_space(DECODE, H200, size=5000).configs if c not in content.configs)
    (file,) = record(fake(), folder, [(DECODE, [other])], RecordOptions(), say=lambda _: None)
    grown = landscape.read(file)
    assert grown.configs == (*content.configs, other)
    assert grown.known == (*content.known, len(content.configs))
    assert grown.missing == ()


def test_broken_engine_ends_the_recording_with_its_reason(tmp_path: Path) -> None:
    """No compiler: said once, and the file is kept."""
    engine = fake()

    def broken(job: object) -> object:
        raise EngineError("no nvcc here")

    engine.compile = broken  # type: ignore[method-assign, assignment]
    with pytest.raises(EngineError, match="no nvcc here"):
        _record(tmp_path, engine)
    assert len(list(tmp_path.iterdir())) == 1
