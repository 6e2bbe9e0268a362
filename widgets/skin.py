"""What plain ipywidgets lack in the browser: accessible names for their controls, and word of the theme."""

from __future__ import annotations

from importlib import resources

import anywidget
import traitlets


def asset(name: str) -> str:
    """The text of a file in `static/`. As a string: a path as `_esm` would keep every closed widget alive."""
    return resources.files(__package__).joinpath("static", name).read_text(encoding="utf-8")


class Skin(anywidget.AnyWidget):
    """An invisible part of a panel. It names sliders, fields and groups after their labels, and knows the theme.

    `dark` follows the notebook's theme; it stays False where no JavaScript of ours runs. Sliders, text fields and groups
    of buttons have no accessible name of their own (ipywidgets 8): the script gives each the text of its label, or its
    tooltip.
    """

    _esm = asset("skin.js")
    _css = asset("panel.css")
    dark = traitlets.Bool(False).tag(sync=True)

    def __repr__(self) -> str:
        return "Skin()"
