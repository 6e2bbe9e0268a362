"""The places of a model that can be observed and edited, by one naming for both families.

    encoder.block[i]  what encoder block i hands on           [U, A]; Music Flamingo [U, 2, A]: two positions of 20 ms
    encoder.out       what the projector starts from, `raw`   [U, A]
    timed             after rotary time, Music Flamingo only  [U, A]
    projected         what stands in the prompt for audio     [U, D]
    deepstack[k]      added after block k, MOSS-Music only    [U, D]
    embed             the decoder's input, audio in           [R, D]   = resid[0] = layer 0
    resid[i]          what decoder block i receives           [R, D]   = layer i, for i < n
    attn_out[i]       what attention of block i adds          [R, D]
    mlp_out[i]        what the MLP of block i adds            [R, D]
    resid[n]          before the final norm                   [R, D]   no layer number
    final             after the final norm                    [R, D]   = layer n = layer -1
    logits            of the positions the call keeps         [R, V]

U audio tokens of all sources, source by source; R positions that are not padding, request by request; A audio width;
D language width; V vocabulary; n decoder blocks. Layer numbers are those of `Session.extract_contextual_embeddings`.
For MOSS-Music resid[1] to resid[3] are after DeepStack was added, as the block receives them; its encoder.out is the input
of the adapter, so an edit there shows in what is projected, and not in `raw` of an AudioEmbedding. Besides these names,
any path of `session.model.named_modules()` is a point: the output of that module.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from .errors import ArgumentError

if TYPE_CHECKING:
    from .batch import PreparedBatch


@dataclass(frozen=True)
class Layout:
    """Where audio tokens lie in one call of a module: `take` [m] in its flattened leading dimensions, `rows` [m] tokens.

    `rows` count the batch's audio tokens source by source. Both are int64 on the CPU.
    """

    take: torch.Tensor
    rows: torch.Tensor


Layouts = Callable[["PreparedBatch"], Sequence[Layout]]


@dataclass(frozen=True, eq=False)
class Point:
    """One place: its `name`; `shape` in letters and numbers; `layer`, its number as a layer, or None.

    `module` and `side` ("in" or "out") say where it is in torch; `axis` is "audio", "prompt" or "module" (a raw path);
    `width` trailing sizes of a row, None where unknown; `layouts` gives an audio point's tokens, call by call.
    """

    name: str
    shape: tuple[str | int, ...]
    layer: int | None = None
    module: torch.nn.Module = field(repr=False, default_factory=torch.nn.Identity)
    side: str = field(repr=False, default="out")
    axis: str = field(repr=False, default="prompt")
    width: tuple[int, ...] | None = field(repr=False, default=None)
    layouts: Layouts | None = field(repr=False, default=None)

    def __repr__(self) -> str:
        layer = "" if self.layer is None else f", layer {self.layer}"
        return f"Point({self.name!r}, [{', '.join(map(str, self.shape))}]{layer})"


def select(points: Mapping[str, Point], pattern: str) -> tuple[Point, ...]:
    """Points whose names match a pattern with `*` and `?`; brackets stand for themselves."""
    plain = pattern.replace("[", "[[]")
    return tuple(point for name, point in points.items() if fnmatch.fnmatchcase(name, plain))


def resolve(points: Mapping[str, Point], names: str | Sequence[str], model: torch.nn.Module) -> tuple[Point, ...]:
    """Points by name, pattern, negative number (`resid[-1]`) or module path, each once, in the order asked.

    Raises: ArgumentError for no name at all, and for a name that is none of these, with the closest three.
    """
    asked: list = [names] if isinstance(names, str) or not hasattr(names, "__iter__") else list(names)
    if not all(isinstance(name, str) for name in asked):
        raise ArgumentError(
            f"points is {names!r}; pass names, such as ['resid[3]', 'projected']", code="bad_argument", source="points"
        )
    if not asked:
        raise ArgumentError("points is empty; pass at least one name", code="bad_argument", source="points")
    found: dict[str, Point] = {}
    for name in asked:
        for point in _named(points, name, model):
            found[point.name] = point
    return tuple(found.values())


def _named(points: Mapping[str, Point], name: str, model: torch.nn.Module) -> Sequence[Point]:
    name = _counted(points, name)
    if name in points:
        return (points[name],)
    if "*" in name or "?" in name:
        matching = select(points, name)
        if matching:
            return matching
    modules = dict(model.named_modules())
    if name and name in modules:
        return (Point(name, ("whatever the module returns",), module=modules[name], axis="module"),)
    near = difflib.get_close_matches(name, [*points, *filter(None, modules)], n=3, cutoff=0)
    raise ArgumentError(
        f"{name!r} is neither a point nor a module of this model; the closest are {', '.join(near)} "
        "(session.points() lists all)",
        code="bad_argument",
        source="points",
    )


def _counted(points: Mapping[str, Point], name: str) -> str:
    """`resid[-1]` -> `resid[n]`: numbers from the end, as in Python."""
    match = re.fullmatch(r"(.+)\[-(\d+)\]", name)
    if match is None:
        return name
    count = sum(1 for known in points if re.fullmatch(rf"{re.escape(match[1])}\[\d+\]", known))
    number = count - int(match[2])
    return f"{match[1]}[{number}]" if 0 <= number < count else name
