"""Which seconds an answer rests on, by gradients: gradient x input and integrated gradients at `projected`.

Conventions. What is explained is the natural log-probability of a given answer. `projected` is what stands in the prompt
for audio, [U, D]; a token's attribution is the sum over its D dimensions, so that it has the unit of the
log-probability (nats). Everything else, the text of the prompt and answer included, is held as it is. Gradients are
taken with respect to that place alone: no parameter gets a `.grad`, and none of the encoder's graph is kept.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from .. import edits
from ..batch import AudioEmbedding, PreparedBatch
from ..errors import ArgumentError
from ..request import Request
from .answers import Answer, answer_ids, answer_scores, answered
from .sweep import Progress, prepared, silenced_request

if TYPE_CHECKING:
    from ..session import Session

BASELINES = ("silence", "mean", "zeros")
# A miss of more than this share of what is to be explained is warned of.
_MISS = 0.05
Baseline = str | torch.Tensor | np.ndarray


@dataclass(frozen=True, eq=False)
class Attribution:
    """How much each audio token of one source added to an answer's log-probability.

    `values` [U_i] float64 nats, `intervals` [U_i, 2] seconds; `method` and, for integrated gradients, `baseline`; `answer`
    as text; `score` its log-probability, `baseline_score` that with the baseline in place of all audio of the request
    (NaN for gradient x input); `delta`, the request's sum of attributions minus (score - baseline_score), which is 0 for an
    exact integral; `n_forwards` of all requests together and `forwards_per_s`.
    """

    sample_index: int
    audio_index: int
    name: str
    method: str
    baseline: str
    answer: str
    values: np.ndarray
    intervals: np.ndarray
    score: float
    baseline_score: float
    delta: float
    n_forwards: int
    forwards_per_s: float

    def __repr__(self) -> str:
        return (
            f"Attribution({self.method}, request {self.sample_index}, audio {self.audio_index}, {self.name!r}: "
            f"{len(self.values)} tokens, sum {self.values.sum():.4f} for {self.answer!r}, log-probability {self.score:.4f})"
        )

    def describe(self) -> str:
        """What a plot of it shows, in words."""
        k = int(np.argmax(np.abs(self.values)))
        text = (
            f"{self.method[0].upper()}{self.method[1:]} of {self.name} for the answer {self.answer!r} (log-probability "
            f"{self.score:.3f}): {len(self.values)} audio tokens over {self.intervals[-1, 1]:.2f} s add up to "
            f"{self.values.sum():+.3f}. The largest is {self.values[k]:+.3f} at {self.intervals[k, 0]:.2f}-"
            f"{self.intervals[k, 1]:.2f} s."
        )
        if np.isfinite(self.delta):
            text += (
                f" Against the baseline ({self.baseline}) the answer's log-probability is {self.baseline_score:.3f}; the "
                f"integral misses the difference by {abs(self.delta):.2g}."
            )
        return text


def gradient_x_input(
    session: Session, batch: Request | PreparedBatch, answer: Answer | Sequence[Answer], deepstack: bool = False
) -> tuple[Attribution, ...]:
    """Gradient x input at `projected` for an answer's log-probability (Simonyan et al., 2013; Shrikumar et al., 2016).

    `batch` of any requests, with one answer for all or one each; returns one Attribution a source. For MOSS-Music the
    DeepStack streams, the audio's other way in, are held as they are; with `deepstack=True` they are attributed as well
    and added to their token.

    Cost: one forward and one backward of each request, with the graph of the language model in memory.
    Raises: ArgumentError for a batch without audio, `deepstack` on a model without it, or a wrong answer; RequestError
    `too_long`; SessionBusyError.

    >>> from audiollm import Request, demo
    >>> session = demo.load("music_flamingo")
    >>> found = gradient_x_input(session, Request("Which instrument?", [demo.clips()["bass"]]), "piano")
    >>> found[0].values.shape, found[0].intervals[:2].tolist()
    ((300,), [[0.0, 0.04], [0.04, 0.08]])
    """
    run = _Run(session, batch, answer, deepstack)
    with Progress("gradient x input", len(run.batch), run.width) as progress, frozen(session.model):
        scores, gradients = run.gradients(run.inputs)
        progress.add(len(run.batch))
    values = {point: gradients[point] * x for point, x in run.inputs.items()}
    return run.results("gradient x input", "", values, scores, None, progress)


def integrated_gradients(
    session: Session,
    batch: Request | PreparedBatch,
    answer: Answer | Sequence[Answer],
    baseline: Baseline | Mapping[str, Baseline] = "silence",
    steps: int = 50,
    deepstack: bool = False,
) -> tuple[Attribution, ...]:
    """Integrated gradients at `projected` for an answer's log-probability (Sundararajan et al., 2017).

    (x - x') times the mean gradient on the straight way from the baseline x' to x, by Gauss-Legendre quadrature with `steps`
    points, as captum's `LayerIntegratedGradients` does by default; `delta` in the result is how far the attributions are
    from adding up, and past 5 % of the difference it is warned of. `baseline` is "silence", what the model makes of silence
    of equal length; "mean", each source's own mean embedding; "zeros"; or a tensor [D] or [U, D] over all sources (a
    mapping by point with `deepstack=True`). From zeros the integral converges badly in these models: the first norm makes
    a tiny vector as long as any other, so nearly everything happens in the first thousandth of the way.
    `batch`, `answer`, `deepstack` and the result as in `gradient_x_input`; without `deepstack`, MOSS-Music's DeepStack
    streams keep their actual values also where the baseline stands, so that they explain none of the difference.

    With captum, for a batch of one request with one source of up to 30 s (`projector` is what
    `session.points("projected")[0].module` gives):

        LayerIntegratedGradients(lambda mel: logprob(session.model(input_features=mel, ...)), projector).attribute(
            mel, baselines=mel_of_silence, n_steps=50)

    Cost: steps + 2 forwards and steps backwards of each request, one after the other; the graph of one is in memory.
    Raises: as `gradient_x_input`; ArgumentError for a baseline of another name or shape, or `steps` under 1.

    >>> from audiollm import Request, demo
    >>> session = demo.load("moss_music")
    >>> batch = session.prepare([Request("Which instrument?", [demo.clips()["bass"]])])
    >>> found = integrated_gradients(session, batch, "piano", baseline="silence", steps=20)[0]
    >>> abs(found.delta) < 0.01 * abs(found.score - found.baseline_score)
    True
    """
    if isinstance(steps, bool) or not isinstance(steps, (int, np.integer)) or steps < 1:
        raise _bad(f"steps is {steps!r}; pass a whole number from 1, such as 50", "steps")
    run = _Run(session, batch, answer, deepstack)
    start = run.baselines(baseline)
    nodes, weights = np.polynomial.legendre.leggauss(int(steps))
    total = {point: torch.zeros_like(x) for point, x in run.inputs.items()}
    n = len(run.batch)
    with Progress("integrated gradients", (steps + 2) * n, run.width) as progress, frozen(session.model):
        scores, start_scores = run.scores(run.inputs), run.scores(start)
        progress.add(2 * n)
        for node, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
            between = {point: start[point] + node * (x - start[point]) for point, x in run.inputs.items()}
            _, gradients = run.gradients(between)
            for point, gradient in gradients.items():
                total[point] += weight * gradient
            progress.add(n)
    values = {point: total[point] * (x - start[point]) for point, x in run.inputs.items()}
    name = baseline if isinstance(baseline, str) else "given"
    return run.results("integrated gradients", name, values, scores, start_scores, progress)


class _Run:
    """One batch with its answer: actual values at the points, and scores and gradients for others in their place."""

    def __init__(
        self, session: Session, batch: Request | PreparedBatch, answer: Answer | Sequence[Answer], deepstack: bool
    ) -> None:
        self.session = session
        self.batch = prepared(session, batch, "batch")
        if not self.batch.slots:
            raise _bad("the batch has no audio, so there is nothing to attribute to", "batch")
        streams = [point.name for point in session.points("deepstack*")]
        if deepstack and not streams:
            raise _bad(f"deepstack=True, and {session.family} has no DeepStack; leave it out", "deepstack")
        self.points = ["projected", *(streams if deepstack else [])]
        self.ids = answer_ids(session, self.batch, answer)
        self.width = answered(session, self.batch, self.ids).width
        self.inputs = self._values(session.extract_audio_embeddings(self.batch))

    def _values(self, embeddings: Sequence[AudioEmbedding]) -> dict[str, torch.Tensor]:
        """[U, D] float32 a point, over all sources."""
        parts = [[e.projected for e in embeddings]]
        parts += [[e.deepstack_projected[k] for e in embeddings] for k in range(len(self.points) - 1)]
        return {point: torch.cat(part).float() for point, part in zip(self.points, parts, strict=True)}

    def baselines(self, given: Baseline | Mapping[str, Baseline]) -> dict[str, torch.Tensor]:
        """[U, D] float32 a point."""
        by_point = given if isinstance(given, Mapping) else dict.fromkeys(self.points, given)
        if set(by_point) != set(self.points):
            raise _bad(f"baseline has {', '.join(by_point)}; it must have {', '.join(self.points)}", "baseline")
        silent: dict[str, torch.Tensor] = {}
        if any(isinstance(value, str) and value == "silence" for value in by_point.values()):
            requests = [silenced_request(self.batch, b) for b in range(len(self.batch))]
            silent = self._values(self.session.extract_audio_embeddings(self.session.prepare(requests)))
        return {point: self._baseline(point, by_point[point], silent) for point in self.points}

    def _baseline(self, point: str, given: Baseline, silent: Mapping[str, torch.Tensor]) -> torch.Tensor:
        x = self.inputs[point]
        if isinstance(given, str):
            if given not in BASELINES:
                raise _bad(f"baseline is {given!r}; pass one of {', '.join(BASELINES)}, or a tensor", "baseline")
            if given == "mean":
                counts = [len(slot.token_positions) for slot in self.batch.slots]
                return torch.cat([part.mean(0).expand_as(part) for part in x.split(counts)])
            return silent[point] if given == "silence" else torch.zeros_like(x)
        value = torch.as_tensor(given).detach().to(x)
        if value.shape not in (x.shape, x.shape[1:]):
            raise _bad(
                f"baseline is {list(value.shape)}; it must be {list(x.shape)} or {list(x.shape[1:])}", "baseline"
            )
        return value.expand_as(x)

    def scores(self, values: Mapping[str, torch.Tensor], grad: bool = False) -> torch.Tensor:
        """Log-probability [B] of the answers with `values` in the points' place."""
        with self.session.edit({point: edits.replace(value) for point, value in values.items()}):
            return answer_scores(self.session, self.batch, self.ids, grad=grad).total

    def gradients(self, values: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Scores [B] and the gradient [U, D] of their sum by point: requests do not depend on each other."""
        leaves = {point: value.detach().clone().requires_grad_() for point, value in values.items()}
        scores = self.scores(leaves, grad=True)
        gradients = torch.autograd.grad(scores.sum(), list(leaves.values()))
        return scores.detach(), dict(zip(leaves, gradients, strict=True))

    def results(
        self,
        method: str,
        baseline: str,
        values: Mapping[str, torch.Tensor],
        scores: torch.Tensor,
        start_scores: torch.Tensor | None,
        progress: Progress,
    ) -> tuple[Attribution, ...]:
        """One Attribution a source from the points' values [U, D]."""
        by_token = torch.stack([value.double().sum(-1) for value in values.values()]).sum(0).cpu().numpy()
        ends = np.cumsum([0, *(len(slot.token_positions) for slot in self.batch.slots)])
        parts = [by_token[a:b] for a, b in pairwise(ends)]
        sums = np.zeros(len(self.batch))
        for slot, part in zip(self.batch.slots, parts, strict=True):
            sums[slot.sample_index] += part.sum()
        score = scores.double().cpu().numpy()
        start = np.full(len(score), np.nan) if start_scores is None else start_scores.double().cpu().numpy()
        delta = sums - (score - start)
        missed = np.abs(delta) > _MISS * np.abs(score - start)  # False where there is no baseline, NaN
        if missed.any():
            warnings.warn(
                f"the integral of request(s) {np.flatnonzero(missed).tolist()} misses up to "
                f"{np.abs(delta / (score - start))[missed].max():.0%} of the difference to the baseline; take more steps, or "
                'another baseline (with "zeros", more steps hardly help)',
                stacklevel=3,
            )
        found = []
        for slot, timeline, part in zip(self.batch.slots, self.batch.timeline, parts, strict=True):
            b = slot.sample_index
            text = self.session.processor.tokenizer.decode(list(self.ids[b]))
            found.append(
                Attribution(
                    sample_index=b,
                    audio_index=slot.audio_index,
                    name=slot.name,
                    method=method,
                    baseline=baseline,
                    answer=text,
                    values=part,
                    intervals=timeline.token_intervals(),
                    score=float(score[b]),
                    baseline_score=float(start[b]),
                    delta=float(delta[b]),
                    n_forwards=progress.done,
                    forwards_per_s=progress.forwards_per_s,
                )
            )
        return tuple(found)


@contextmanager
def frozen(model: torch.nn.Module) -> Iterator[None]:
    """Inside, no parameter asks for a gradient, so that a graph begins where a tensor of ours does; then as before."""
    asked = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in asked:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in asked:
            parameter.requires_grad_(True)


def _bad(what: str, source: str) -> ArgumentError:
    return ArgumentError(what, code="bad_argument", source=source)
