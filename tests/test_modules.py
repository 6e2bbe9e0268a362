"""The list of places: every point and module once, with what torch says of their shapes, and a filter that finds them."""

from __future__ import annotations

import pytest
import torch

from audiollm import ArgumentError
from audiollm.modules import places


def test_every_point_and_every_module_is_there_once(session):
    points, modules = places(session, kind="points"), places(session, kind="modules")
    assert [place.name for place in points] == [point.name for point in session.points()]
    assert [place.name for place in modules] == [path for path, _ in session.model.named_modules() if path]
    assert [place.name for place in places(session)] == [place.name for place in (*points, *modules)]
    assert len({place.name for place in places(session)}) == len(points) + len(modules), "a name means one place"


def test_parameters_are_each_told_once_with_their_shape_and_dtype(session):
    told = {
        f"{place.name}.{parameter.name}": (parameter.shape, parameter.dtype)
        for place in places(session, kind="modules")
        for parameter in place.parameters
    }
    every = {name: (tuple(value.shape), value.dtype) for name, value in session.model.named_parameters()}
    tied = dict(session.model.named_parameters(remove_duplicate=False))
    assert every.items() <= told.items() and set(told) <= set(tied)


def test_points_have_the_shape_that_they_compute(session, batch):
    for place in places(session, kind="points"):
        seen = session.capture(batch, place.name, tokens="last" if place.name == "logits" else None)[place.name]
        assert tuple(seen.values.shape[1:]) == place.shape[1:] and seen.values.dtype == place.dtype
        assert place.is_point and place.depth == 0


def test_the_filter_finds_parts_of_names_and_patterns(session):
    assert [place.name for place in places(session, "RESID[2")] == ["resid[2]"]
    assert [place.name for place in places(session, " resid[?] ", "points")] == [
        f"resid[{k}]" for k in range(session.n_layers + 1)
    ]
    found = places(session, "*q_proj", "modules")
    assert found and all(place.name.endswith("q_proj") and place.what == "Linear" for place in found)
    assert places(session, "no such place") == ()


def test_words(session_moss):
    (point,) = places(session_moss, "resid[1]", "points")
    assert point.describe() == f"resid[1]: [R, {point.shape[1]}] float32, layer 1"
    (embed,) = places(session_moss, "encoder.out", "points")
    assert embed.describe().endswith("float32"), "no layer number"
    bare = next(place for place in places(session_moss, kind="modules") if place.what == "ModuleList")
    assert bare.describe() == f"{bare.name}: ModuleList" and bare.depth == bare.name.count(".")
    assert point.dtype is torch.float32


def test_another_kind_is_refused(session_moss):
    with pytest.raises(ArgumentError, match="kind is 'layers'; pass one of 'all', 'points', 'modules'"):
        places(session_moss, kind="layers")
