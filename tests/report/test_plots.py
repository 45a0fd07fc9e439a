"""Axes, drawings and colours: numbers land where they belong, and colours can be told apart."""

from __future__ import annotations

import math
import re
from importlib.resources import files
from itertools import combinations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from nestpipe.profiling.svg import ticks
from nestpipe.report.number_format import count, duration, metric, num_bytes, share, significant
from nestpipe.report.plots import LinePlot, Series, draw_lines

NUMBERS = st.floats(-1e9, 1e9, allow_nan=False)


@given(NUMBERS, st.floats(1e-6, 1e9), st.integers(2, 12))
def test_ticks_are_round_inside_and_few(low, wide, most):
    assume(wide > 1e-5 * abs(low))  # below that the digits of a float run out
    high = low + wide
    found = ticks(low, high, most=most)
    assert len(found) <= most
    steps = np.diff(found)
    if len(steps):
        assert np.allclose(steps, steps[0], rtol=1e-6, atol=1e-9 * max(abs(low), abs(high)))
        mantissa = steps[0] / 10.0 ** math.floor(math.log10(steps[0]) + 1e-6)
        assert min(abs(mantissa - digit) for digit in (1, 2, 5, 10)) < 1e-3
    slack = 1e-6 * (high - low) + 1e-9 * max(abs(low), abs(high))
    assert all(low - slack <= tick <= high + slack for tick in found)


def test_an_axis_of_one_number_has_no_ticks():
    with pytest.raises(ValueError, match="has no ticks"):
        ticks(1.0, 1.0, most=5)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (count(1234567.0), "1,234,567"),
        (metric(0.84366), "0.8437"),
        (metric(math.nan), "not a number"),
        (share(0.9407), "94.1 %"),
        (
            [significant(x) for x in (3.06519, 6668.3, 0.0002, 1.5e-7, 0.0, -0.25)],
            ["3.065", "6,668", "0.0002", "1.5e-07", "0", "-0.25"],
        ),
        ([duration(x) for x in (94.07, 99.96, 725.0, 12000.0)], ["94.1 s", "100.0 s", "12 min 05 s", "3 h 20 min"]),
        ([num_bytes(x) for x in (12, 1264, 999_600, 1.26e6, 2.5e9)], ["12 B", "1.26 kB", "1 MB", "1.26 MB", "2.5 GB"]),
    ],
)
def test_numbers_are_written_one_way(shown, expected):
    assert shown == expected


def points_of(drawing: str, tag: str, kind: str) -> np.ndarray:
    found = re.search(rf'<{tag} points="([^"]*)" class="{kind}', drawing)
    assert found
    return np.array([[float(value) for value in pair.split(",")] for pair in found[1].split()])


def drawn(points, **settings) -> str:
    lines = LinePlot(title="t", x_label="x", y_label="y", series=[Series("a", points)], summary="s", **settings)
    return draw_lines(lines)


@pytest.mark.parametrize("from_zero", [False, True])
def test_a_line_is_an_affine_picture_of_its_points(from_zero):
    points = [(float(x), float(x * x % 7) + 1) for x in range(10, 60, 3)]
    places = points_of(drawn(points, from_zero=from_zero), "polyline", "line")
    given = np.array(points)
    for axis in (0, 1):
        slope, offset = np.polyfit(given[:, axis], places[:, axis], 1)
        assert np.abs(slope * given[:, axis] + offset - places[:, axis]).max() < 0.11, "places have one decimal"
        assert (slope > 0) == (axis == 0), "up is smaller in SVG"
    labels = [float(text) for text in re.findall(r'text-anchor="end">([\d.]+)<', drawn(points, from_zero=from_zero))]
    assert (min(labels) == 0) == from_zero


def test_many_points_are_thinned_to_means_and_keep_their_extremes():
    points = [(float(x), 1.0) for x in range(5000)]
    points[1234] = (1234.0, 9.0)
    drawing = drawn(points, from_zero=True)
    line, band = points_of(drawing, "polyline", "line"), points_of(drawing, "polygon", "band")
    assert len(line) <= 200
    assert band[:, 1].min() < line[:, 1].min() - 50, "the one high value is seen in the band"
    assert len(drawing) < 20_000


@pytest.mark.parametrize("points", [[(5.0, 3.0)], [(1.0, 2.0), (2.0, 2.0)], [(1.0, 0.0), (2.0, 0.0)], [(0.0, -1e-9)]])
def test_flat_and_single_points_are_drawn_inside(points):
    places = points_of(drawn(points, from_zero=True), "polyline", "line")
    assert np.isfinite(places).all()
    assert (places >= 0).all()
    assert (places <= 400).all()


# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
BLIND = {
    "nobody": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) / [
    [0.9505],
    [1.0],
    [1.089],
]


def lab(colour: str, sight: np.ndarray) -> np.ndarray:
    """A colour in CIE Lab as somebody sees it."""
    rgb = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(sight @ linear, 0, 1)
    root = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * root[1] - 16, 500 * (root[0] - root[1]), 200 * (root[1] - root[2])])


def palettes() -> list[dict[str, str]]:
    """The colours of style.css, light and dark."""
    style = files("nestpipe.report").joinpath("style.css").read_text()
    blocks = re.findall(r":root\{(.*?)\}", style, re.DOTALL)
    assert len(blocks) == 2
    return [dict(re.findall(r"--(\w+):(#[0-9a-f]{6})", block)) for block in blocks]


@pytest.mark.parametrize("sight", BLIND)
@pytest.mark.parametrize(
    "names",
    [("busy", "lookup", "communication", "bubble"), ("s0", "s1", "s2", "s3", "s4", "s5")],
    ids=["causes", "series"],
)
def test_colours_differ_for_every_reader(sight, names):
    """A difference of 2.3 in Lab is just noticeable; fills side by side want several times that; lines also have dashes."""
    for palette in palettes():
        for a, b in combinations(names, 2):
            distance = np.linalg.norm(lab(palette[a], BLIND[sight]) - lab(palette[b], BLIND[sight]))
            assert distance > 15, f"{a} and {b} are {distance:.1f} apart"
