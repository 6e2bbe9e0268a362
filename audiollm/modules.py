"""A model as a list: its named points with the shape of their rows, and its tree of modules with their own parameters."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .errors import ArgumentError

if TYPE_CHECKING:
    from .session import Session

KINDS = ("all", "points", "modules")


@dataclass(frozen=True)
class Parameter:
    """One parameter of a module itself, not of its children: `name`, `shape`, `dtype`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __repr__(self) -> str:
        return f"{self.name} {list(self.shape)} {_short(self.dtype)}"


@dataclass(frozen=True)
class Place:
    """One place that can be observed.

    `name`, of a point or a module path of `session.model.named_modules()`; `is_point`; `what`, the class of the module. A
    point has `shape`, in the letters of `audiollm.points`, the `dtype` of its values and its `layer` number or None; a module
    has the `parameters` of its own.
    """

    name: str
    is_point: bool
    what: str
    shape: tuple[str | int, ...] = ()
    dtype: torch.dtype | None = None
    layer: int | None = None
    parameters: tuple[Parameter, ...] = ()

    @property
    def depth(self) -> int:
        """How deep a module lies in the tree; 0 for points and for children of the model."""
        return 0 if self.is_point else self.name.count(".")

    def describe(self) -> str:
        """One line: a point with shape, dtype and layer, or a module with its class and parameters."""
        if self.is_point:
            dtype = "" if self.dtype is None else f" {_short(self.dtype)}"
            layer = "" if self.layer is None else f", layer {self.layer}"
            return f"{self.name}: [{', '.join(map(str, self.shape))}]{dtype}{layer}"
        own = "; ".join(map(repr, self.parameters))
        return f"{self.name}: {self.what}" + (f" ({own})" if own else "")


def places(session: Session, text: str = "", kind: str = "all") -> tuple[Place, ...]:
    """Points, then modules in the order of the tree, whose name holds `text` or matches it where it has `*` or `?`.

    `kind` "points" or "modules" leaves the others out. Case does not matter; brackets stand for themselves.
    Raises: ArgumentError for another `kind`.

    >>> from audiollm import demo
    >>> session = demo.load("moss_music")
    >>> places(session, "resid[3]")[0].describe()
    'resid[3]: [R, 64] float32, layer 3'
    >>> places(session, "*q_proj", "modules")[0].describe()
    'audio_encoder.layers.0.self_attn.q_proj: Linear (weight [64, 64] float32; bias [64] float32)'
    """
    if kind not in KINDS:
        raise ArgumentError(
            f"kind is {kind!r}; pass one of {', '.join(map(repr, KINDS))}", code="bad_argument", source="kind"
        )
    found: list[Place] = []
    if kind != "modules":
        found += [
            Place(point.name, True, type(point.module).__name__, point.shape, session.dtype, point.layer)
            for point in session.points()
        ]
    if kind != "points":
        found += [
            Place(path, False, type(module).__name__, parameters=_own(module))
            for path, module in session.model.named_modules()
            if path
        ]
    return tuple(place for place in found if _matches(place.name.lower(), text.strip().lower()))


def _matches(name: str, text: str) -> bool:
    if "*" in text or "?" in text:
        return fnmatch.fnmatchcase(name, text.replace("[", "[[]"))
    return text in name


def _own(module: torch.nn.Module) -> tuple[Parameter, ...]:
    return tuple(
        Parameter(name, tuple(value.shape), value.dtype) for name, value in module.named_parameters(recurse=False)
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
