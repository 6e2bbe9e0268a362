"""The page that `audiollm demo` writes: one HTML file without links to anywhere."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..plots import overview

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..analysis import LayerNorms
    from ..batch import PreparedBatch

RANDOM = (
    "The embedded models have random weights: shapes, times and norms are real, what they say is nonsense. "
    "Load a published snapshot with load_model(folder) for answers."
)
_STYLE = (
    ":root{color-scheme:light dark}"
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;margin:1rem 0}td,th{border:1px solid #999;padding:.2rem .6rem;text-align:left}"
    "img{max-width:100%;background:#fff}pre{border:1px solid #999;padding:1rem;overflow-x:auto;white-space:pre-wrap}"
)


@dataclass(frozen=True, eq=False)
class Section:
    """One model's part of the page: `title`, its batch, the norms of each source, and an answer a request."""

    title: str
    batch: PreparedBatch
    norms: Sequence[LayerNorms]
    texts: Sequence[str]


def write(path: Path, title: str, sections: Sequence[Section], codec: str) -> None:
    """Write the page: each section's batch as tables, one picture a source, the generated texts; then the codec's HTML."""
    parts = [f"<h1>{html.escape(title)}</h1><p><strong>{html.escape(RANDOM)}</strong></p>"]
    for section in sections:
        parts += _section(section)
    parts.append(f"<h2>Codec</h2>{codec}")
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    path.write_text(head + "\n".join(parts) + "</html>\n", encoding="utf-8", errors="replace")


def _section(section: Section) -> list[str]:
    batch = section.batch
    parts = [f"<h2>{html.escape(section.title)}</h2>", batch._repr_html_()]
    for slot, timeline, norms in zip(batch.slots, batch.timeline, section.norms, strict=True):
        alt = (
            f"{slot.name} over {slot.used_s:.2f} seconds: waveform, {len(slot.windows)} encoder windows, "
            f"{timeline.n_tokens} audio tokens, and the norm of the states at layers {norms.layers[0]} to {norms.layers[-1]}"
        )
        picture = _png(overview(slot, timeline, norms))
        parts.append(f'<h3>{html.escape(slot.name)}</h3><img alt="{html.escape(alt)}" src="{picture}">')
    for request, text in zip(batch.requests, section.texts, strict=True):
        parts.append(f"<h3>Answer</h3><p>{html.escape(request.prompt)}</p><pre>{html.escape(text)}</pre>")
    return parts


def _png(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
