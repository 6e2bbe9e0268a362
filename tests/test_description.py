"""Figures in words: every kind of mark is told with its values, and other data give other words."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure

from audiollm.plots import description


def drawn(draw, **limits) -> str:
    figure = Figure()
    axes = figure.subplots()
    draw(axes)
    axes.set(**limits)
    return description(figure)


MARKS = {
    "line": lambda axes, k: axes.plot([0, 1, 2], [k, 2, 3], label="a"),
    "image": lambda axes, k: axes.imshow([[k, 2.0], [3.0, np.nan]]),
    "mesh": lambda axes, k: axes.pcolormesh([[k, 2.0], [3.0, 4.0]]),
    "points": lambda axes, k: axes.scatter([0, 1], [k, 2.0]),
    "bars": lambda axes, k: axes.bar(["x", "y"], [k, 2.0], label="b"),
    "area": lambda axes, k: axes.fill_between([0, 1, 2], [k, 0, 0], [4, 5, 6]),
}


@pytest.mark.parametrize("kind", MARKS)
def test_every_kind_of_mark_is_told_with_its_values(kind):
    one = drawn(lambda axes: MARKS[kind](axes, 1.0))
    assert kind in one and one == drawn(lambda axes: MARKS[kind](axes, 1.0))
    assert one != drawn(lambda axes: MARKS[kind](axes, 1.5)), "another value, other words"


def test_missing_values_are_counted():
    told = drawn(lambda axes: MARKS["image"](axes, 1.0))
    assert "image 2 x 2: 3 values, 1..3, mean 2, 1 missing" in told


def test_titles_labels_and_limits_are_told():
    told = drawn(lambda axes: axes.plot([1, 2]), title="T", xlabel="seconds", ylabel="norm", xlim=(0, 9))
    assert "axes 0 'T', x 'seconds' 0..9, y 'norm' 1..2" in told


def test_rounding_noise_is_not_told():
    assert (
        drawn(lambda a: a.plot([1e-12, 1])) == drawn(lambda a: a.plot([-1e-13, 1])) == drawn(lambda a: a.plot([0, 1]))
    )


def test_many_marks_are_counted_not_listed():
    told = drawn(lambda axes: [axes.plot([k, k + 1]) for k in range(40)])
    assert told.count("line") == 6 and "and 34 more" in told
