"""Closing a whole tree of widgets: `Widget.close` frees one model and leaves its children, layout and style behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ipywidgets


def close_tree(widget: ipywidgets.Widget) -> None:
    """Close a widget and all that it holds, each once, with their callbacks."""
    for each in list(_reached(widget, set())):
        each.unobserve_all()
        ipywidgets.Widget.close(each)


def _reached(widget: ipywidgets.Widget, seen: set[int]) -> Iterator[ipywidgets.Widget]:
    if id(widget) in seen:
        return
    seen.add(id(widget))
    for name in widget.trait_names(sync=True):
        for value in _values(widget._trait_values.get(name)):
            if isinstance(value, ipywidgets.Widget):
                yield from _reached(value, seen)
    yield widget


def _values(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (tuple, list)):
        yield from value
    else:
        yield value
