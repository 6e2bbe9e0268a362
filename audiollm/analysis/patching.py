"""Which place of the model carries what, layer by second: activation patching (Meng et al., 2022; Heimersheim and Nanda, 2024).

Conventions. Two runs of one prompt with audio of equal length, clean and corrupted. A cell runs the corrupted request with
the clean run's rows put in at one layer, at the audio tokens of one window of seconds (denoising). Its `values` are the
metric; `recovered` = (m - m_corrupted) / (m_clean - m_corrupted) is 0 where nothing came back and 1 where all did.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..batch import PreparedBatch
from ..errors import ArgumentError
from ..generation import Stop
from ..points import Point
from ..request import Request
from ..rows import Rows
from .metric import Asked, Metric
from .patch_cells import check_layout, chosen_columns, columns_of, places_of, sources_of
from .sweep import (
    Progress,
    SweepFile,
    checked_batch_size,
    digest,
    prepared,
    repeated,
    time_windows,
    token_windows,
)

if TYPE_CHECKING:
    from ..session import Session


@dataclass(frozen=True, eq=False)
class PatchGrid:
    """The metric with clean rows put into the corrupted run, by place (K rows) and window (W columns).

    `points` K names and `windows` [W, 2] seconds; `values` [K, W] float64; `also` C names of other columns ("audio", "text",
    "last", "all") and `also_values` [K, C]; NaN where a sweep was stopped before. `clean` and `corrupted` are the metric of
    the two runs, `names` of their sources, `metric` in words; `same_text` whether the runs differ in audio alone;
    `n_forwards` of this call and `forwards_per_s`.
    """

    points: tuple[str, ...]
    windows: np.ndarray
    values: np.ndarray
    also: tuple[str, ...]
    also_values: np.ndarray
    clean: float
    corrupted: float
    metric: str
    names: tuple[str, str]
    same_text: bool
    n_forwards: int = field(repr=False)
    forwards_per_s: float = field(repr=False)

    @property
    def recovered(self) -> np.ndarray:
        """[K, W] share of the metric that came back; NaN everywhere if both runs score the same."""
        return self._share(self.values)

    @property
    def also_recovered(self) -> np.ndarray:
        """[K, C] the same for the other columns."""
        return self._share(self.also_values)

    @property
    def complete(self) -> bool:
        """Whether every cell was measured."""
        return bool(np.isfinite(self.values).all() and np.isfinite(self.also_values).all())

    def _share(self, values: np.ndarray) -> np.ndarray:
        gap = self.clean - self.corrupted
        return (values - self.corrupted) / gap if gap else np.full(values.shape, np.nan)

    def describe(self) -> str:
        """What a plot of it shows, in words."""
        text = (
            f"Rows of {self.names[0]} (clean) put into {self.names[1]} (corrupted) at {len(self.points)} place(s), "
            f"{self.points[0]} to {self.points[-1]}, in {len(self.windows)} windows over {self.windows[-1, 1]:.2f} s. "
            f"{self.metric} is {self.clean:.3f} clean and {self.corrupted:.3f} corrupted."
        )
        shares = self.recovered
        if np.isfinite(shares).any():
            k, w = np.unravel_index(np.nanargmax(shares), shares.shape)
            start_s, end_s = self.windows[w]
            text += f" Most comes back at {self.points[k]}, {start_s:.2f}-{end_s:.2f} s: {shares[k, w]:.0%}."
        elif self.clean == self.corrupted:
            text += " Both runs score the same, so there is nothing to recover."
        if not self.same_text:
            text += " The texts of the two prompts differ too."
        left = int(np.isnan(self.values).sum() + np.isnan(self.also_values).sum())
        return text + (f" {left} cells were not measured." if left else "")

    def __repr__(self) -> str:
        done = int(np.isfinite(self.values).sum() + np.isfinite(self.also_values).sum())
        return (
            f"PatchGrid({self.points[0]} to {self.points[-1]} x {len(self.windows)} windows and {len(self.also)} other columns, "
            f"{done} of {self.values.size + self.also_values.size} cells; {self.metric}: clean {self.clean:.4f}, corrupted "
            f"{self.corrupted:.4f})"
        )


def patch_sweep(
    session: Session,
    clean: Request | PreparedBatch,
    corrupted: Request | PreparedBatch,
    metric: Metric,
    point: str = "resid",
    layers: Sequence[int] | None = None,
    seconds: float | None = 1.0,
    hop_s: float | None = None,
    source: int | Sequence[int] | None = None,
    also: Sequence[str] = (),
    deepstack: bool = True,
    batch_size: int = 8,
    path: str | Path | None = None,
    stop: Stop | None = None,
) -> PatchGrid:
    """Put rows of the clean run into the corrupted one, place by place and window by window, and measure what comes back.

    `metric` is an answer (its log-probability), a pair (good, bad) of answers (the difference of theirs), or a function
    of the last position's logits [B, V] in float32 that returns [B]. `point` is "resid", "attn_out" or "mlp_out" with
    `layers` (all by default; resid[i] is what block i receives), or a place by itself, such as "projected", one row.
    Windows are of `seconds` (None: the whole source), one every `hop_s`, over `source` (a number, several, or by default
    all sources together). `also` adds columns over other positions: "audio", every audio token of the chosen sources;
    "text", everything that is no audio; "last", the last position of the prompt; "all". Audio alone gives the
    clean run back at "projected" and resid[0] only: from block 1 on, text has already taken corrupted audio in.

    MOSS-Music adds audio again after its first blocks (DeepStack). What is still to come after the patched place is
    patched with it, at the same tokens, at "projected", "embed" and "resid"; `deepstack=False` leaves it corrupted.

    With `path`, the grid is written to that file after every batch, and a call with the same arguments goes on where it
    was left; a function as metric is known by its name and by the scores of the two runs. `stop`, a threading.Event or a
    function, is asked before every batch; what was not reached is NaN.

    Cost: for a grid of K x C cells 2 + K * (C + 1) forwards (twice that for a pair whose answers begin differently before
    their last token), `batch_size` at a time; the number is logged (INFO) before the first runs.
    Raises: ArgumentError where prompts or audio are not equally long, naming the difference, for an argument out of
    range, and for a file of another sweep; RequestError `too_long`; SessionBusyError.

    >>> from audiollm import Request, demo
    >>> session = demo.load("moss_music")
    >>> clean, corrupted = (Request("Which?", [demo.clips()[name]]) for name in ("bass", "drums"))
    >>> grid = patch_sweep(session, clean, corrupted, ("bass", "drums"), layers=(0, 3, 6), seconds=4.0, also=("all",))
    >>> grid.recovered.shape, grid.also_recovered.round(3).tolist()
    ((3, 3), [[1.0], [1.0], [1.0]])
    """
    batch_size = checked_batch_size(batch_size)
    runs = prepared(session, clean, "clean"), prepared(session, corrupted, "corrupted")
    same_text = check_layout(*runs)
    places = places_of(session, point, layers)
    numbers = sources_of(source, runs[1])
    timeline = max((runs[1].timeline[k] for k in numbers), key=lambda t: t.used_s)
    windows = time_windows(timeline.used_s, timeline.used_s if seconds is None else seconds, hop_s, "seconds")
    windows, _ = token_windows(windows, timeline.token_intervals(), "seconds")
    also = columns_of(also, places)
    asked = Asked(session, runs, metric)
    grid = _Grid(session, asked, places, deepstack, chosen_columns(asked, windows, also, numbers))
    file = None if path is None else SweepFile(path, {
        "model": session.identity or repr(session), "dtype": str(session.dtype), "clean": digest(runs[0]),
        "corrupted": digest(runs[1]), "metric": asked.name, "points": [p.name for p in places],
        "windows": windows.tolist(), "also": list(also), "source": numbers, "deepstack": deepstack,
    })  # fmt: skip
    stored = None if file is None else file.load()
    todo = grid.todo if stored is None else ~stored["done"]
    total = len(asked.variants) * (2 + int(todo.sum()) + int(todo.any(axis=1).sum()))
    with Progress("patching", total, asked.width, stop) as progress:
        scores = [float(grid.plain(side)) for side in (0, 1)]
        progress.add(2 * len(asked.variants))
        if stored is not None:
            grid.resume(stored, scores, path)
        for cells in grid.chunks(batch_size):
            if progress.should_stop():
                break
            progress.add(grid.run(*cells))
            if file is not None:
                file.save(values=grid.values, done=~grid.todo, scores=np.array(scores))
    return PatchGrid(
        points=tuple(place.name for place in places),
        windows=windows,
        values=grid.values[:, : len(windows)],
        also=also,
        also_values=grid.values[:, len(windows) :],
        clean=scores[0],
        corrupted=scores[1],
        metric=asked.name,
        names=(runs[0].slots[numbers[0]].name, runs[1].slots[numbers[0]].name),
        same_text=same_text,
        n_forwards=progress.done,
        forwards_per_s=progress.forwards_per_s,
    )


class _Grid:
    """Cells of places x columns: `values` and what is `todo`, both [K, C]; `chosen` gives each variant's [C, L] columns."""

    def __init__(
        self, session: Session, asked: Asked, places: Sequence[Point], deepstack: bool, chosen: list[np.ndarray]
    ) -> None:
        self.session, self.asked, self.places, self.chosen = session, asked, places, chosen
        self.streams = [p.name for p in session.points("deepstack*")] if deepstack else []
        self.values = np.full((len(places), len(chosen[0])), np.nan)
        self.todo = np.ones(self.values.shape, bool)
        self.captured: tuple[int, list] = (-1, [])

    def plain(self, side: int) -> torch.Tensor:
        """The metric of the clean (0) or corrupted (1) run."""
        return sum(
            (self._metric(variant.runs[side], variant.terms)[0] for variant in self.asked.variants), torch.tensor(0.0)
        )

    def resume(self, stored: dict[str, np.ndarray], scores: list[float], path: object) -> None:
        """Go on from a file. Raises: ArgumentError where its two runs scored differently: another metric of that name."""
        if not np.allclose(stored["scores"], scores, rtol=1e-3, atol=1e-3):
            raise ArgumentError(
                f"{path} belongs to another sweep: its runs score {stored['scores'].tolist()}, these {scores}",
                code="bad_argument",
                source=path,
            )
        self.values[:] = stored["values"]
        self.todo[:] = ~stored["done"]

    def chunks(self, size: int) -> list[tuple[int, np.ndarray]]:
        """(place, columns) of the cells to do, at most `size` columns each."""
        todo = [(k, np.flatnonzero(row)) for k, row in enumerate(self.todo)]
        return [(k, columns[i : i + size]) for k, columns in todo for i in range(0, len(columns), size)]

    def run(self, k: int, columns: np.ndarray) -> int:
        """Measure some columns of one place; returns the forwards that took."""
        forwards = 0
        if self.captured[0] != k:
            points = [self.places[k].name, *self._still_to_come(self.places[k])]
            seen = [
                self.session.capture(v.runs[0], points, device=None, limit_bytes=1 << 62) for v in self.asked.variants
            ]
            self.captured = (k, seen)
            forwards += len(seen)
        total = torch.zeros(len(columns), dtype=torch.float64)
        for variant, seen, chosen in zip(self.asked.variants, self.captured[1], self.chosen, strict=True):
            edits = {name: _put_in(seen[name].values, seen[name].rows, chosen[columns]) for name in seen}
            with self.session.edit(edits):
                total += self._metric(repeated(variant.runs[1], len(columns)), variant.terms)
            forwards += len(columns)
        self.values[k, columns] = total.numpy()
        self.todo[k, columns] = False
        return forwards

    def _metric(self, batch: PreparedBatch, terms: list) -> torch.Tensor:
        kept = max((len(ids) for _, ids in terms), default=1)
        return self.asked.score(self.session.forward(batch, logits_to_keep=kept).logits, terms)

    def _still_to_come(self, place: Point) -> list[str]:
        """Streams that are added after a place: stream k after block k."""
        if place.name in ("projected", "embed"):
            return self.streams
        match = re.fullmatch(r"resid\[(\d+)\]", place.name)
        return self.streams[int(match[1]) :] if match else []


def _put_in(new: torch.Tensor, its: Rows | None, chosen: np.ndarray) -> Callable[[torch.Tensor, Rows], torch.Tensor]:
    """An edit that puts `new` [m, ...], rows `its` of one request, into copy b of that request where `chosen` [b, L]."""
    assert its is not None
    where = np.zeros(chosen.shape[1], np.int64)
    where[its.position] = np.arange(len(its))

    def edit(values: torch.Tensor, rows: Rows) -> torch.Tensor:
        at = np.flatnonzero(chosen[rows.sample_index, rows.position])
        taken = new[torch.from_numpy(where[rows.position[at]]).to(new.device)]
        return values.index_put((torch.from_numpy(at).to(values.device),), taken.to(values))

    return edit
