"""A prompt as one strip: which positions are padding, text, markers and audio of which source."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ..token_runs import token_runs

if TYPE_CHECKING:
    from ..batch import PreparedBatch

# Okabe and Ito's colours, as the token table has them; hatches where colours alone would be hard to tell apart.
ROLE_COLOURS = {
    "padding": "#999999",
    "system": "#56B4E9",
    "user": "#0072B2",
    "audio": "#E69F00",
    "marker": "#CC79A7",
    "assistant": "#009E73",
}
_RED = "#D55E00"


def token_strip(batch: PreparedBatch, sample_index: int = 0, selected: tuple[int, int, int] | None = None) -> Figure:
    """Draw the padded prompt of one request, position by position; `selected` (source, first, last) is framed.

    Returns a matplotlib Figure that belongs to no window. Raises: ArgumentError for a request that is not there.

    >>> from audiollm import Request, demo
    >>> session = demo.load("moss_music")
    >>> batch = session.prepare([Request("Which instrument?", [demo.clips()["bass"]])])
    >>> token_strip(batch, 0, (0, 12, 24)).axes[0].get_xlabel()
    'position in the padded prompt'
    """
    runs = token_runs(batch, sample_index)
    figure = Figure(figsize=(11, 1.9), layout="constrained")
    axes = figure.subplots()
    for run in runs:
        axes.broken_barh([(run.first - 0.5, len(run))], (0, 1), color=ROLE_COLOURS[run.role], linewidth=0)
        if run.role == "audio" and len(run) > batch.width / 25:
            middle = (run.first + run.last) / 2
            axes.text(middle, 0.5, f"source {run.slot}", ha="center", va="center", fontsize=9, color="#111111")
    if selected is not None and batch.slots[selected[0]].sample_index == sample_index:
        timeline = batch.timeline[selected[0]]
        first, last = (timeline.token_to_position(token) for token in selected[1:])
        axes.broken_barh(
            [(first - 0.5, last - first + 1)], (-0.12, 1.24), facecolor="none", edgecolor=_RED, linewidth=2
        )
    present = [role for role in ROLE_COLOURS if any(run.role == role for run in runs)]
    handles = [Patch(facecolor=ROLE_COLOURS[role], label=role) for role in present]
    axes.legend(handles=handles, ncols=len(handles), loc="lower center", bbox_to_anchor=(0.5, 1.02), frameon=False)
    axes.set(xlim=(-0.5, batch.width - 0.5), ylim=(-0.2, 1.2), yticks=[], xlabel="position in the padded prompt")
    return figure
