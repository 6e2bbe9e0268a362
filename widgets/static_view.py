"""What a panel shows, without a panel: text, pictures and tables that survive in a saved notebook."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from html import escape
from typing import Any


@dataclass(frozen=True)
class Picture:
    """A PNG and what it shows, in words."""

    png: bytes
    alt: str

    def html(self) -> str:
        """An `img` element that holds its own data."""
        data = base64.b64encode(self.png).decode("ascii")
        return f'<img alt="{escape(self.alt)}" src="data:image/png;base64,{data}" style="max-width:100%">'


@dataclass(frozen=True)
class Table:
    """Rows of text under a head, with a caption."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def html(self) -> str:
        """A table element."""
        head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in self.head)
        body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in self.rows)
        return f"<table><caption>{escape(self.caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


@dataclass(frozen=True)
class StaticView:
    """A panel's twin: `text`, its description; `pictures` and `tables`. Notebooks show and keep it without a kernel."""

    text: str
    pictures: tuple[Picture, ...] = ()
    tables: tuple[Table, ...] = ()

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        parts = [picture.html() for picture in self.pictures] + [table.html() for table in self.tables]
        return f"<div><pre>{escape(self.text)}</pre>{''.join(parts)}</div>"

    def bundle(self) -> dict[str, Any]:
        """MIME types for a notebook that may not have the panel's code: text, and the first picture or the tables."""
        bundle: dict[str, Any] = {"text/plain": self.text}
        if self.pictures:
            bundle["image/png"] = base64.b64encode(self.pictures[0].png).decode("ascii")
        elif self.tables:
            bundle["text/html"] = "".join(table.html() for table in self.tables)
        return bundle
