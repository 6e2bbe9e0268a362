"""The page that `audiollm demo` writes: one HTML file without links to anywhere."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..plots import overview

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..analysis import LayerNorms
    from ..batch import PreparedBatch

RANDOM = (
    "The embedded model has random weights: shapes, times and norms are real, what it says is nonsense. "
    "Load a published snapshot with load_model(folder) for answers."
)
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;margin:1rem 0}td,th{border:1px solid #999;padding:.2rem .6rem;text-align:left}"
    "img{max-width:100%}pre{background:#eee;color:#000;padding:1rem;overflow-x:auto;white-space:pre-wrap}"
)


def write(path: Path, title: str, batch: PreparedBatch, norms: Sequence[LayerNorms], texts: Sequence[str]) -> None:
    """Write the page: the batch as tables, one picture a source, the generated texts."""
    parts = [f"<h1>{html.escape(title)}</h1><p><strong>{html.escape(RANDOM)}</strong></p>", batch._repr_html_()]
    for slot, timeline, mine in zip(batch.slots, batch.timeline, norms, strict=True):
        alt = (
            f"{slot.name} over {slot.used_s:.2f} seconds: waveform, {len(slot.windows)} encoder windows, "
            f"{timeline.n_tokens} audio tokens, and the norm of the states at layers {mine.layers[0]} to {mine.layers[-1]}"
        )
        parts.append(
            f'<h2>{html.escape(slot.name)}</h2><img alt="{html.escape(alt)}" src="{_png(overview(slot, timeline, mine))}">'
        )
    for request, text in zip(batch.requests, texts, strict=True):
        parts.append(f"<h2>Answer</h2><p>{html.escape(request.prompt)}</p><pre>{html.escape(text)}</pre>")
    page = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    path.write_text(page + "\n".join(parts) + "</html>\n", encoding="utf-8", errors="replace")


def _png(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
