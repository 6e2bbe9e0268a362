"""Which seconds an answer rests on, by taking them away: occlusion over windows of a source (Zeiler and Fergus, 2014).

Conventions. What is measured is the natural log-probability of a given answer; `change` is occluded minus original, so
that a negative change says that the window spoke for the answer. Windows are [start_s, end_s) of the source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..batch import AudioEmbedding, AudioSlot, PreparedBatch
from ..errors import ArgumentError
from ..generation import Stop
from ..request import Request, Waveform
from ..rows import Rows
from .answers import Answer, answer_ids, answer_scores, answered
from .sweep import (
    Progress,
    checked_batch_size,
    heard_request,
    in_windows,
    one_request,
    repeated,
    silenced_request,
    time_windows,
    token_windows,
)

if TYPE_CHECKING:
    from ..session import Session

FILLS = {"waveform": ("silence", "noise"), "embedding": ("silence", "mean", "noise")}


@dataclass(frozen=True, eq=False)
class Occlusion:
    """What each window of one source does to an answer's log-probability.

    `windows` [W, 2] seconds; `change` [W] float64 nats, occluded minus original, NaN where a sweep was stopped before;
    `score`, the original log-probability of `answer`; `intervals` [U_i, 2] seconds of the source's tokens; `level` and
    `fill` as asked; `slot`, the source as the model heard it; `n_forwards` and `forwards_per_s`.
    """

    name: str
    answer: str
    level: str
    fill: str
    score: float
    windows: np.ndarray
    change: np.ndarray
    intervals: np.ndarray
    slot: AudioSlot = field(repr=False)
    seed: int
    n_forwards: int
    forwards_per_s: float

    @property
    def curve(self) -> np.ndarray:
        """[U_i] float64 nats: for each audio token, the mean change of the windows that hold its centre."""
        inside = in_windows(self.windows, self.intervals) & np.isfinite(self.change)[:, None]
        counts = inside.sum(axis=0)
        sums = np.where(inside, self.change[:, None], 0.0).sum(axis=0)
        return np.divide(sums, counts, out=np.full(len(counts), np.nan), where=counts > 0)

    def heard(self, window: int) -> Waveform:
        """The source as the model heard it with one window occluded, at the model's rate; made when asked for.

        Raises: ArgumentError for a window that is not there, and at level "embedding", where no waveform is changed.
        """
        if self.level != "waveform":
            raise _bad('at level "embedding" no waveform is changed; use level="waveform" to listen', "level")
        if not 0 <= window < len(self.windows):
            raise _bad(f"window {window} is not one of 0..{len(self.windows) - 1}", "window")
        samples = _occluded(self.slot, self.windows[window], self.fill, self.seed)
        return Waveform(samples, self.slot.sample_rate)

    def describe(self) -> str:
        """What a plot of it shows, in words."""
        text = (
            f"Occlusion of {self.name} with {self.fill} ({self.level} level) over {len(self.windows)} windows of "
            f"{self.windows[0, 1] - self.windows[0, 0]:g} s; the answer {self.answer!r} has log-probability {self.score:.3f}."
        )
        if not np.isfinite(self.change).any():
            return text + " Nothing was measured yet."
        for word, k in (("falls", np.nanargmin(self.change)), ("rises", np.nanargmax(self.change))):
            value, (start_s, end_s) = self.change[k], self.windows[k]
            if (value < 0) == (word == "falls") and value != 0:
                text += f" It {word} most, by {abs(value):.3f}, without {start_s:.2f}-{end_s:.2f} s."
        left = int(np.isnan(self.change).sum())
        return text + (f" {left} windows were not measured." if left else "")

    def __repr__(self) -> str:
        done = self.change[np.isfinite(self.change)]
        low, high = (done.min(), done.max()) if len(done) else (np.nan, np.nan)
        return (
            f"Occlusion({self.name!r}, {self.level} {self.fill}, {len(done)} of {len(self.windows)} windows, change of "
            f"{self.answer!r} {low:.4f} to {high:.4f} from {self.score:.4f})"
        )


def occlusion(
    session: Session,
    request: Request | PreparedBatch,
    answer: Answer,
    window_s: float = 1.0,
    hop_s: float | None = None,
    source: int = 0,
    fill: str = "silence",
    level: str = "waveform",
    batch_size: int = 8,
    seed: int = 0,
    stop: Stop | None = None,
) -> Occlusion:
    """Take window after window of a source away and see what becomes of an answer's log-probability.

    `request`, or a batch in which `source` is a number of `batch.slots`, whose request is then taken alone. Windows are
    `window_s` long, one every `hop_s` seconds (by default side by side), the last one cut at the source's end.

    `level="waveform"` changes what the model hears and encodes it again: `fill` "silence" (zeros), or "noise" (normal, as
    loud as the source). An encoder sees whole windows of its own, so other tokens change a little too. `level="embedding"`
    changes the tokens in the window alone, at `projected` and, for MOSS-Music, at the DeepStack streams, so that nothing of
    the audio is left there: with "silence" (what the model makes of a silent source at that place), "mean" (of the source's
    tokens), or "noise" (normal, with the mean and deviation of the source's tokens, dimension by dimension). Noise is
    drawn with `seed` from a generator of its own. `stop`, a threading.Event or a function, is asked before every batch;
    windows that were not reached are NaN.

    Cost: one forward a window and one for the original, `batch_size` at a time, each over the prompt and answer; at
    level "waveform" also the mel of every window. The number is logged (INFO) before the first runs.
    Raises: ArgumentError for an argument out of range, a source that is not there, or a window without a token;
    RequestError `too_long`; SessionBusyError.

    >>> from audiollm import Request, demo
    >>> session = demo.load("moss_music")
    >>> found = occlusion(session, Request("Which instrument?", [demo.clips()["bass"]]), "piano", window_s=3.0)
    >>> found.windows.tolist()
    [[0.0, 3.0], [3.0, 6.0], [6.0, 9.0], [9.0, 12.0]]
    >>> found.change.shape, found.heard(1).duration_s
    ((4,), 12.0)
    """
    if level not in FILLS:
        raise _bad(f"level is {level!r}; pass 'waveform' or 'embedding'", "level")
    if fill not in FILLS[level]:
        raise _bad(f"fill is {fill!r}; at level {level!r} pass one of {', '.join(map(repr, FILLS[level]))}", "fill")
    batch_size = checked_batch_size(batch_size)
    batch, number = one_request(session, request, source, "request")
    ids = answer_ids(session, batch, [answer] if isinstance(answer, str) else answer)[0]
    slot, timeline = batch.slots[number], batch.timeline[number]
    windows = time_windows(timeline.used_s, window_s, hop_s)
    intervals = timeline.token_intervals()
    width = answered(session, batch, ids).width
    run: Callable[[range], torch.Tensor]
    if level == "waveform":
        run = _WaveformRun(session, batch, slot, ids, fill, seed, windows)
    else:
        windows, inside = token_windows(windows, intervals)
        run = _EmbeddingRun(session, batch, number, ids, fill, seed, inside)
    change = np.full(len(windows), np.nan)
    with Progress("occlusion", 1 + len(windows), width, stop) as progress:
        score = float(answer_scores(session, batch, ids).total[0])
        progress.add(1)
        for first in range(0, len(windows), batch_size):
            if progress.should_stop():
                break
            some = range(first, min(first + batch_size, len(windows)))
            change[some] = run(some).double().cpu().numpy() - score
            progress.add(len(some))
    return Occlusion(
        name=slot.name,
        answer=session.processor.tokenizer.decode(list(ids)),
        level=level,
        fill=fill,
        score=score,
        windows=windows,
        change=change,
        intervals=intervals,
        slot=slot,
        seed=seed,
        n_forwards=progress.done,
        forwards_per_s=progress.forwards_per_s,
    )


class _WaveformRun:
    """Numbers of w windows -> log-probability [w] of the answer with each taken out of the waveform."""

    def __init__(
        self,
        session: Session,
        batch: PreparedBatch,
        slot: AudioSlot,
        ids: Sequence[int],
        fill: str,
        seed: int,
        windows: np.ndarray,
    ) -> None:
        self.session, self.batch, self.slot, self.ids = session, batch, slot, ids
        self.fill, self.seed, self.windows = fill, seed, windows

    def __call__(self, some: range) -> torch.Tensor:
        requests = []
        for k in some:
            changed = {self.slot.audio_index: _occluded(self.slot, self.windows[k], self.fill, self.seed)}
            requests.append(heard_request(self.batch, 0, changed))
        return answer_scores(self.session, self.session.prepare(requests), self.ids).total


class _EmbeddingRun:
    """Numbers of w windows -> log-probability [w] of the answer with other rows in the place of each one's tokens."""

    def __init__(
        self,
        session: Session,
        batch: PreparedBatch,
        number: int,
        ids: Sequence[int],
        fill: str,
        seed: int,
        inside: np.ndarray,
    ) -> None:
        self.session, self.batch, self.number, self.ids, self.inside = session, batch, number, ids, inside
        silent = session.prepare([silenced_request(batch, 0)]) if fill == "silence" else batch
        there = by_point(session.extract_audio_embeddings(silent)[number])
        generator = torch.Generator().manual_seed(seed)
        self.fills = {point: _fill(x, fill, generator) for point, x in there.items()}

    def __call__(self, some: range) -> torch.Tensor:
        batch, inside = repeated(self.batch, len(some)), self.inside[some]

        def replaced(new: torch.Tensor) -> Callable[[torch.Tensor, Rows], torch.Tensor]:
            def edit(values: torch.Tensor, rows: Rows) -> torch.Tensor:
                mine = np.flatnonzero(rows.source % len(self.batch.slots) == self.number)
                at = mine[inside[rows.sample_index[mine], rows.token[mine]]]
                taken = new[torch.from_numpy(rows.token[at]).to(new.device)]
                return values.index_put((torch.from_numpy(at).to(values.device),), taken.to(values))

            return edit

        with self.session.edit({point: replaced(new) for point, new in self.fills.items()}):
            return answer_scores(self.session, batch, self.ids).total


def by_point(embedding: AudioEmbedding) -> dict[str, torch.Tensor]:
    """All that a source puts into the language model, [U_i, D] a point: `projected` and any `deepstack[k]`."""
    streams = {f"deepstack[{k}]": stream for k, stream in enumerate(embedding.deepstack_projected)}
    return {"projected": embedding.projected, **streams}


def _occluded(slot: AudioSlot, window: np.ndarray, fill: str, seed: int) -> np.ndarray:
    """The source's samples [N] float32 with one window filled. The same seed gives every window its cut of one noise."""
    samples = slot.waveform.numpy().copy()
    first, last = (round(float(second) * slot.sample_rate) for second in window)
    samples[first:last] = 0.0
    if fill == "noise":
        loudness = float(np.sqrt(np.mean(np.square(slot.waveform.numpy(), dtype=np.float64))))
        noise = np.random.default_rng(seed).standard_normal(len(samples), dtype=np.float32)
        samples[first:last] = loudness * noise[first:last]
    return samples


def _fill(x: torch.Tensor, fill: str, generator: torch.Generator) -> torch.Tensor:
    """[U_i, D] float32 rows to put in place of a source's."""
    x = x.float()
    if fill == "mean":
        return x.mean(0).expand_as(x)
    if fill == "noise":
        draw = torch.randn(x.shape, generator=generator).to(x)
        return x.mean(0) + x.std(0, correction=0) * draw
    return x


def _bad(what: str, source: str) -> ArgumentError:
    return ArgumentError(what, code="bad_argument", source=source)
