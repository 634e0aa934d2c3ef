"""Pictures: well-formed, with every value in them, in colours that a page can change."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from kernels.devices import PROFILES
from pictures import curves, ladder, ratios, roofline
from pictures.svg import INK, PALETTE, LinearScale, LogScale, Picture, variable

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cli.conftest import Ran

ROOT = Path(__file__).resolve().parents[2]
DEV, LADDER = (ROOT / "results" / "h200" / name for name in ("dev.json", "ladder.json"))
H200 = PROFILES[0]


def texts(svg: str) -> list[str]:
    """Every text and tip of a drawing."""
    return [node.text or "" for node in ElementTree.fromstring(svg).iter() if node.tag.endswith(("text", "title"))]


def contrast(one: str, other: str) -> float:
    """Contrast of two colours as WCAG defines it."""

    def luminance(colour: str) -> float:
        parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_file_holds_colours_and_page_holds_names() -> None:
    """The same drawing; text that looks like a colour's name stays text."""
    drawn = Picture(width=10, height=10, title='a "title" & more')
    drawn.rect(0, 0, 5, 5, INK, tip="<tip>")
    drawn.text(1, 1, 'fill="@ink"')
    assert f'fill="{PALETTE[INK][0]}"' in drawn.render()
    assert f'fill="var({variable(INK)})"' in drawn.fragment()
    for svg in (drawn.render(), drawn.fragment()):
        assert {"<tip>", 'fill="@ink"'} <= set(texts(svg))
        assert not re.search(r'="@[a-z]+"', svg)


def test_page_defines_every_colour_in_both_themes() -> None:
    """The style sheet and the palette say the same, for the chosen theme and for the system's."""
    css = (ROOT / "api" / "pages" / "static" / "pages.css").read_text()
    for name, (light, dark) in PALETTE.items():
        assert re.findall(rf"{variable(name)}: (#\w+);", css) == [light, dark, dark], name


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_lines_and_words_stand_out_from_the_paper(theme: int) -> None:
    """3 to 1 for marks, 4.5 to 1 for text."""
    paper = PALETTE["paper"][theme]
    for name in ("ours", "theirs", "third"):
        assert contrast(PALETTE[name][theme], paper) >= 3, name
    for name in ("ink", "faint"):
        assert contrast(PALETTE[name][theme], paper) >= 4.5, name


def test_marks_of_an_axis_are_round_and_enough() -> None:
    """Wide and narrow ranges."""
    assert LogScale(low=0.5, high=2000, start=0, length=1).marks() == [1, 10, 100, 1000]
    assert LogScale(low=1, high=60, start=0, length=1).marks() == [1, 2, 5, 10, 20, 50]
    assert LogScale(low=170, high=230, start=0, length=1).marks() == pytest.approx([180, 200, 220])
    assert LinearScale(low=0, high=39, start=0, length=1).marks() == [0, 10, 20, 30]
    scale = LinearScale(low=0, high=10, start=100, length=-50)
    assert (scale.at(0), scale.at(10), scale.at(99)) == (100, 50, 50)


def test_curve_steps_down_and_names_each_improvement() -> None:
    """Between two improvements the line is level."""
    svg = curves.best_so_far([(0, 200.0), (3, 150.0)], 9, library_us=140.0).render()
    assert {"trial 0: 200.00 us", "trial 3: 150.00 us", "vendor library, 140 us"} <= set(texts(svg))
    points = [tuple(map(float, pair.split(","))) for pair in re.findall(r'points="([^"]+)"', svg)[0].split()]
    assert len(points) == 4
    assert points[0][1] == points[1][1]
    assert points[1][0] == points[2][0]
    assert points[2][1] == points[3][1]
    assert points[2][1] > points[1][1], "a shorter time lies lower"


def test_curve_of_one_trial_is_drawn() -> None:
    """A job that has just begun."""
    assert "trial 0: 5.00 us" in texts(curves.best_so_far([(0, 5.0)], 0).render())


def test_every_sample_is_drawn_beside_the_library() -> None:
    """Also when all are equal, and with a baseline that was not timed."""
    svg = curves.samples([5.0, 5.0], {"torch": [5.0, 5.0], "triton": []}).render()
    assert {"ours, round 2: 5.000 us", "torch, round 1: 5.000 us"} <= set(texts(svg))
    assert not any("triton" in text for text in texts(svg))


def test_point_of_the_roofline_lies_where_its_numbers_say() -> None:
    """At the ridge both roofs meet; a link makes the drawing a group, which keeps its links for a screen reader."""
    ridge = H200.peak_flops / H200.bandwidth_bytes_per_s
    point = roofline.Point(name="a shape", flops_per_byte=ridge, tflops=H200.peak_flops / 2e12, link="/results/1")
    svg = roofline.picture([point], H200).fragment()
    assert any("50% of the roof" in text for text in texts(svg))
    assert 'role="group"' in svg
    assert 'role="img"' in roofline.picture([], H200).fragment()


def test_classes_hold_every_recorded_shape_once() -> None:
    """Shapes that the library's aligned kernels cannot take stand apart."""
    rows = json.loads(DEV.read_text())["rows"]
    classes = ratios.by_class(rows)
    assert sum(map(len, classes.values())) == len(rows)
    assert all(row["n"] % 8 for row in classes[ratios.UNALIGNED])
    assert ratios.class_of(16, 8) == "M up to 16"
    assert ratios.class_of(17, 8) == "M 17 to 128"
    assert ratios.class_of(20_000, 8) == ratios.LARGEST


def test_pictures_of_the_documents_are_what_their_commands_draw(
    cli: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each picture under docs/ is followed by its command, which draws it again byte for byte."""
    monkeypatch.chdir(ROOT)
    found = []
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for name, command in re.findall(
            r"!\[[^\]]*\]\([./]*pictures/(\w+)\.svg\)\s+`gemm-tuner ([^`]+)`", page.read_text()
        ):
            drawn = tmp_path / f"{name}.svg"
            words = command.split()
            assert words[-2:] == ["--svg", f"docs/pictures/{name}.svg"], command
            ran = cli(*words[:-1], str(drawn))
            assert ran.status == 0, ran.err
            assert drawn.read_bytes() == (ROOT / "docs" / "pictures" / f"{name}.svg").read_bytes(), name
            found.append(name)
    assert set(found) == {path.stem for path in (ROOT / "docs" / "pictures").glob("*.svg")}


def test_ladder_names_what_was_not_measured() -> None:
    """A bar is missing, not zero."""
    content = json.loads(LADDER.read_text())
    content["rows"][0]["median_us"] = None
    assert "not measured" in texts(ladder.picture(content).render())
