"""The views of the layer panel as plain functions: what each needs, computes, draws, says, and the lines that do the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

from ..analysis.cross_similarity import cross_similarity
from ..analysis.labels import TokenLabels, label_tokens
from ..analysis.norms import LayerNorms, norms_of
from ..analysis.projection import Projection, project
from ..analysis.similarity import self_similarity
from ..plots.layers import norm_curves, norm_map, similarity_map
from ..plots.projection import projection
from .figure_view import SecondsAxis

if TYPE_CHECKING:
    from ..batch import PreparedBatch
    from ..timeline import SourceTimeline
    from .layer_cache import LayerStates

VIEWS = {
    "norms": "norms over time by layer",
    "map": "layer by time map",
    "self": "self-similarity of a layer",
    "cross": "similarity of two layers or sources",
    "projection": "2-D projection of a layer",
}
# Which controls a view looks at.
USES = {
    "norms": ("source", "layers"),
    "map": ("source", "layers"),
    "self": ("source", "layer", "centered"),
    "cross": ("source", "layer", "other_source", "other_layer", "centered"),
    "projection": ("source", "layer", "colour"),
}
_ALONG = {"norms": "x", "map": "x", "self": "xy", "cross": "", "projection": ""}


@dataclass(frozen=True)
class Asked:
    """One picture: a view, its sources and layers; `colour`, "time" or the name of an annotation; `only`, () or the selection
    (source, start_s, end_s) that its sources are cut to."""

    view: str
    source: int
    layer: int
    other_source: int
    other_layer: int
    layers: tuple[int, ...]
    colour: str = "time"
    centered: bool = True
    only: tuple = ()

    @property
    def needed(self) -> tuple[int, ...]:
        """The layers that it shows."""
        if self.view in ("norms", "map"):
            return self.layers
        return (self.layer, self.other_layer) if self.view == "cross" else (self.layer,)

    @property
    def sources(self) -> tuple[int, ...]:
        """The sources that it shows, each once."""
        return tuple(dict.fromkeys((self.source, self.other_source))) if self.view == "cross" else (self.source,)

    def tokens(self, source: int, timeline: SourceTimeline) -> slice:
        """The tokens of a source that are looked at."""
        found = timeline.tokens_within(*self.only[1:]) if self.only and self.only[0] == source else None
        return slice(0, timeline.n_tokens) if found is None else slice(found[0], found[1] + 1)

    def title(self, batch: PreparedBatch) -> str:
        """What it is of, in words."""
        name = f"source {self.source} {batch.slots[self.source].name}"
        if self.view in ("norms", "map"):
            return f"{VIEWS[self.view]}, {name}"
        title = f"{VIEWS[self.view]}, {name} layer {self.layer}"
        if self.view == "cross":
            title += f", source {self.other_source} {batch.slots[self.other_source].name} layer {self.other_layer}"
        return title


def computed(asked: Asked, states: LayerStates) -> Any:
    """The result that a view shows: LayerNorms, SelfSimilarity, CrossSimilarity or Projection. Raises: as those do."""
    batch, one = states.batch, asked.source
    timeline = batch.timeline[one]
    part = asked.tokens(one, timeline)
    seconds = timeline.token_intervals()[part]
    if asked.view in ("norms", "map"):
        values = states.norms(one, asked.layers)
        norms = norms_of(batch.slots[one], timeline, dict(zip(asked.layers, values, strict=True)))
        return replace(norms, values=norms.values[:, part], intervals=seconds)
    found = states.states(asked.needed)
    mine = found[asked.layer][one][part]
    if asked.view == "self":
        return self_similarity(mine, seconds, centered=asked.centered)
    if asked.view == "cross":
        two = asked.other_source
        other_timeline = batch.timeline[two]
        other_part = asked.tokens(two, other_timeline)
        theirs = found[asked.other_layer][two][other_part]
        other_seconds = other_timeline.token_intervals()[other_part]
        return cross_similarity(mine, seconds, theirs, other_seconds, centered=asked.centered)
    return project(mine, seconds)


def labels_of(asked: Asked, result: Any, annotations: Mapping[str, Any]) -> TokenLabels | None:
    """The labels that colour a projection, or None. Raises: ArgumentError where no token gets one."""
    if asked.view != "projection" or asked.colour == "time":
        return None
    given = annotations[asked.colour]
    intervals, labels = given[asked.source] if isinstance(given, Mapping) else given
    return replace(label_tokens(result.intervals, intervals, labels), name=asked.colour)


def drawn(
    asked: Asked, result: Any, batch: PreparedBatch, labels: TokenLabels | None, selection: tuple
) -> tuple[Figure, list[SecondsAxis], Any]:
    """A result's figure with the selection marked, its axes in seconds, and for a projection where the cursor's dot goes."""
    marks = {selection[0]: selection[1:]} if selection else {}
    mark = marks.get(asked.source)
    track = None
    if asked.view == "projection":
        figure = projection(result, labels, mark, asked.title(batch))
        track = figure.axes[0], np.column_stack([result.intervals[:, 0], result.points])
    elif asked.view in ("self", "cross"):
        two, layer = (asked.other_source, asked.other_layer) if asked.view == "cross" else (asked.source, asked.layer)
        rows, columns = (f"{batch.slots[k].name}, layer {of}" for k, of in ((asked.source, asked.layer), (two, layer)))
        figure = similarity_map(result, rows, columns, mark, marks.get(two))
    else:
        figure = (norm_curves if asked.view == "norms" else norm_map)(result, mark)
    seconds = [] if track else [SecondsAxis(figure.axes[0], _ALONG[asked.view], asked.source)]
    return figure, seconds, track


def along(asked: Asked, source: int) -> str:
    """Along which axes of the picture seconds of a source run: "x", "y", "xy", or "" for none."""
    if asked.view == "cross":
        return "x" * (source == asked.other_source) + "y" * (source == asked.source)
    return _ALONG[asked.view] if source == asked.source else ""


def place(asked: Asked, result: Any, x: float, y: float, playing: int | None) -> tuple[int, float]:
    """The source and second of a place in the picture, given the source that plays; where two fit, the one that plays."""
    if isinstance(result, Projection):
        return asked.source, float(result.intervals[result.nearest(x, y), 0])
    if asked.view == "cross" and asked.source != asked.other_source and playing == asked.source:
        return asked.source, y
    return (asked.other_source if asked.view == "cross" else asked.source), x


def table(asked: Asked, result: Any, labels: TokenLabels | None) -> tuple[str, tuple[str, ...], list[tuple[str, ...]]]:
    """Caption, head and rows of the numbers behind a picture."""
    rows: list[tuple[str, ...]]
    if isinstance(result, LayerNorms):
        rows = [
            (str(k), f"{row.mean():.4g}", f"{row.min():.4g}", f"{row.max():.4g}")
            for k, row in zip(result.layers, result.values, strict=True)
        ]
        return "Norm of the state by layer", ("layer", "mean", "least", "greatest"), rows
    if isinstance(result, Projection):
        rows = [("all tokens", str(len(result.points)), *_mean(result.points))]
        if labels is not None and labels.labels.dtype.kind != "f":
            for name in labels.classes:
                points = result.points[labels.tokens[labels.labels == name]]
                rows.append((str(name), str(len(points)), *_mean(points)))
        return "Mean of the points", ("tokens", "number", "first component", "second component"), rows
    values = result.values
    rows = [(f"{values.mean():.3f}", f"{np.diagonal(values).mean():.3f}", f"{values.min():.3f}", f"{values.max():.3f}")]
    return "Cosines", ("mean", "mean of the diagonal", "least", "greatest"), rows


def code(asked: Asked, batch: PreparedBatch, annotations: Mapping[str, Any], selection: tuple) -> str:
    """Lines that compute and draw the same from `session`, `batch` and `annotations`."""
    one, two = asked.source, asked.other_source
    marks = {selection[0]: selection[1:]} if selection else {}
    if asked.view in ("norms", "map"):
        draw = "norm_curves" if asked.view == "norms" else "norm_map"
        lines = [f"result = layer_norms(session, batch, layers={asked.layers!r})[{one}]"]
        part = asked.tokens(one, batch.timeline[one])
        if asked.only:
            cut = f"{part.start}:{part.stop}"
            lines += [f"result = replace(result, values=result.values[:, {cut}], intervals=result.intervals[{cut}])"]
        lines += [f"figure = {draw}(result, {marks.get(one)!r})"]
        first = ["from dataclasses import replace"] if asked.only else []
        return "\n".join(
            [*first, "from audiollm.analysis import layer_norms", f"from audiollm.plots import {draw}", *lines]
        )
    lines = [f"states = session.extract_contextual_embeddings(batch, layers={tuple(dict.fromkeys(asked.needed))!r})"]
    here = _arguments(asked, batch, one, asked.layer)
    if asked.view == "projection":
        names, draw = "project", "projection"
        lines.append(f"result = project({here})")
        labels = ""
        if asked.colour != "time":
            names = "label_tokens, project"
            each = f"[{one}]" if isinstance(annotations[asked.colour], Mapping) else ""
            lines.append(f"labels = label_tokens(result.intervals, *annotations[{asked.colour!r}]{each})")
            labels = ", labels"
        lines.append(f"figure = projection(result{labels or ', None'}, {marks.get(one)!r})")
    else:
        draw = "similarity_map"
        names = "self_similarity" if asked.view == "self" else "cross_similarity"
        there = "" if asked.view == "self" else ", " + _arguments(asked, batch, two, asked.other_layer)
        lines.append(f"result = {names}({here}{there}, centered={asked.centered})")
        column = marks.get(one if asked.view == "self" else two)
        lines.append(f"figure = similarity_map(result, row_selection={marks.get(one)!r}, column_selection={column!r})")
    return "\n".join([f"from audiollm.analysis import {names}", f"from audiollm.plots import {draw}", *lines])


def _arguments(asked: Asked, batch: PreparedBatch, source: int, layer: int) -> str:
    """The states of a source and their seconds, as written."""
    if not (asked.only and asked.only[0] == source):
        return f"states[{source}][{layer}], batch.timeline[{source}]"
    part = asked.tokens(source, batch.timeline[source])
    cut = f"[{part.start}:{part.stop}]"
    return f"states[{source}][{layer}]{cut}, batch.timeline[{source}].token_intervals(){cut}"


def _mean(points: np.ndarray) -> tuple[str, str]:
    first, second = points.mean(axis=0)
    return tuple(f"{0.0 if abs(value) < 5e-4 else value:.3f}" for value in (first, second))  # type: ignore[return-value]
