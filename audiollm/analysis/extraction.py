"""From requests to probes: states are extracted batch by batch and only the rows that a probe needs are kept.

Everything that headers and labels can tell is checked before a file is decoded or the model runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tqdm.auto import tqdm

from ..audio import read_header
from ..errors import ArgumentError
from .labels import TokenLabels, label_tokens
from .probing import ProbeResult, probe
from .samples import LEVELS, gather
from .splits import grouped_folds

if TYPE_CHECKING:
    from ..batch import PreparedBatch
    from ..request import Request
    from ..session import Session
    from ..timeline import SourceTimeline


def probe_session(
    session: Session,
    requests: Sequence[Request],
    labels: Sequence[Any],
    layers: Sequence[int] | None = None,
    *,
    level: str = "frame",
    groups: Sequence[Hashable] | None = None,
    control: Session | None = None,
    margin_s: float = 0.0,
    batch_requests: int = 1,
    max_gib: float = 16.0,
    **options: Any,
) -> ProbeResult:
    """Extract the states of all requests and probe them; see `probe`, which takes `options` (n_folds, penalty, ...).

    Parameters: `labels`, one entry a source in request then source order: (intervals, labels) as
    `mir_eval.io.load_labeled_intervals` returns them, an object with these attributes as mirdata has, rows (start_s,
    end_s, label), one value a token, or one value for the whole source; `layers`, all by default; `control`, what
    `random_control(session)` returns; `margin_s` as in `label_tokens`; `groups`, one key a source. Sources of one
    request share their context, so they are always one group, and so are sources of equal audio (silence apart).

    Cost: one prefill a request (two with `control`). At the level "frame" every labelled token's states are kept on the
    CPU, layers x tokens x D values (28 layers of 30 s of Music Flamingo: 150 MB in bfloat16); more than `max_gib` is refused
    before anything is decoded. At the level "clip" only means are kept.

    Raises: ArgumentError as `probe` and `label_tokens`, for a number of labels other than that of sources, and for more
    than `max_gib`; what `Session.prepare` raises.

    >>> from audiollm import Request, demo
    >>> from audiollm.analysis.extraction import probe_session
    >>> session, clips = demo.load(), demo.clips()
    >>> requests = [Request("Listen.", [clips[name]]) for name in ("drums", "bass", "keys")]
    >>> halves = [(0.0, 6.0, "first half"), (6.0, 12.0, "second half")]
    >>> result = probe_session(session, requests, [halves] * 3, layers=(0, -1), n_folds=3)
    >>> result.layers, result.n_groups, result.labelled_s
    ((0, -1), 3, 36.0)
    """
    sources = headers(session, requests)
    layers = checked_layers(session, layers)
    if level not in LEVELS:
        raise _bad(f"level is {level!r}; pass 'frame' or 'clip'", "level")
    for what, given in (("labels", labels), ("groups", groups)):
        if given is not None and (isinstance(given, str) or len(given) != len(sources)):
            raise _bad(f"{what} has {len(given)} entries for {len(sources)} source(s); pass one a source", what)
    if control is not None and (repr(control) != repr(session) or control is session):
        raise _bad(f"control is {control!r}, the session {session!r}; pass random_control(session)", "control")
    entries = [_labelled(entry, source, margin_s) for entry, source in zip(labels, sources, strict=True)]
    keys = list(range(len(sources))) if groups is None else list(groups)
    joined = _join(zip(keys, [source.request for source in sources], strict=True))
    empty = [{layer: range(len(source.seconds)) for layer in layers} for source in sources]
    samples = gather(empty, entries, level, options.get("task"), joined, [source.seconds for source in sources])
    n_folds, seed = options.get("n_folds", 5), options.get("seed", 0)
    grouped_folds(samples.targets, samples.group, n_folds, samples.classes is not None, seed)
    if level == "frame":
        _check_size(session, sum(map(len, samples.tokens)) * len(layers), control is not None, max_gib)
    kept: list[_Kept] = []
    controls: list[_Kept] = []
    prints: list[str | None] = []
    for batch in batches(session, requests, batch_requests):
        found = _relabelled(labels, batch, len(kept), margin_s)
        kept += _rows(session, batch, layers, found, level)
        if control is not None:
            controls += _rows(control, batch, layers, found, level)
        prints += [_print(slot.waveform) for slot in batch.slots]
    joined = _join(zip(keys, [source.request for source in sources], prints, strict=True))
    return probe(
        [mine.states for mine in kept],
        [mine.labels for mine in kept],
        level=level,
        groups=joined,
        control=[mine.states for mine in controls] if control is not None else None,
        intervals=[mine.seconds for mine in kept],
        **options,
    )


@dataclass(frozen=True, eq=False)
class SourceHeader:
    """One source before it is decoded: the number of its `request`, and its tokens' `seconds` [U_i, 2]."""

    request: int
    name: str
    seconds: np.ndarray

    def token_intervals(self) -> np.ndarray:
        """[U_i, 2] float64 seconds, as a timeline gives them."""
        return self.seconds


def headers(session: Session, requests: Sequence[Request]) -> list[SourceHeader]:
    """What the headers of all sources say, in request then source order; nothing is decoded.

    Raises: ArgumentError for something other than a list of Requests, or no source at all; AudioError for a file that cannot
    be read.
    """
    adapter, found = session._adapter, []
    adapter._check_requests(requests)
    for b, request in enumerate(requests):
        for k, audio in enumerate(request.audios):
            header = read_header(audio, adapter._name(audio, k))
            n_samples = adapter._used_samples(header)
            edges = np.arange(adapter.n_tokens(n_samples) + 1) * adapter.clock.samples_per_token
            seconds = np.minimum(edges, n_samples) / adapter.clock.sample_rate
            found.append(SourceHeader(b, header.name, np.stack([seconds[:-1], seconds[1:]], axis=1)))
    if not found:
        raise _bad("the requests have no audio; there is nothing to look at", "requests")
    return found


def checked_layers(session: Session, layers: Sequence[int] | None) -> tuple[int, ...]:
    """Layers as asked, all of them for None. Raises: ArgumentError for a layer out of range, or none."""
    if layers is None:
        return tuple(range(session.n_layers + 1))
    layers = tuple(session._checked_layers(layers))
    for layer in layers:
        session._adapter.model_shape().layer(layer)
    if not layers:
        raise _bad("layers is empty; pass at least one", "layers")
    return layers


def batches(session: Session, requests: Sequence[Request], batch_requests: int = 1) -> Iterator[PreparedBatch]:
    """The requests prepared, `batch_requests` at a time, with a progress bar. Raises: ArgumentError for a number below 1."""
    if isinstance(batch_requests, bool) or not isinstance(batch_requests, int) or batch_requests < 1:
        raise _bad(f"batch_requests is {batch_requests!r}; pass a whole number from 1 on", "batch_requests")
    with tqdm(total=len(requests), desc="states", unit="request", disable=None, leave=False) as bar:
        for first in range(0, len(requests), batch_requests):
            batch = session.prepare(requests[first : first + batch_requests])
            yield batch
            bar.update(len(batch))


@dataclass(frozen=True, eq=False)
class _Kept:
    states: dict[int, torch.Tensor]
    labels: Any
    seconds: np.ndarray


def _rows(session: Session, batch: PreparedBatch, layers: Sequence[int], entries: list, level: str) -> list[_Kept]:
    """What a probe needs of each source: its labelled tokens, or the mean over them, on the CPU."""
    kept = []
    states = session.extract_contextual_embeddings(batch, layers)
    for mine, entry, timeline in zip(states, entries, batch.timeline, strict=True):
        seconds, labels = timeline.token_intervals(), entry
        tokens = torch.arange(len(seconds))
        if isinstance(entry, TokenLabels):
            tokens, seconds, labels = torch.from_numpy(entry.tokens), entry.intervals, entry.labels
        rows = {layer: values[tokens.to(values.device)] for layer, values in mine.items()}
        if level == "clip":
            rows = {layer: values.double().mean(dim=0, keepdim=True) for layer, values in rows.items()}
            seconds, labels = np.array([[seconds[0, 0], seconds[-1, 1]]]), np.asarray(labels).reshape(-1)[0]
        kept.append(_Kept({layer: values.cpu() for layer, values in rows.items()}, labels, seconds))
    return kept


def _relabelled(labels: Sequence[Any], batch: PreparedBatch, first: int, margin_s: float) -> list[Any]:
    """The batch's labels on its own timeline: a file can be shorter than its header says."""
    return [_labelled(labels[first + k], timeline, margin_s) for k, timeline in enumerate(batch.timeline)]


def _labelled(entry: Any, source: SourceTimeline | SourceHeader, margin_s: float) -> Any:
    """TokenLabels for whatever holds intervals; one value a token, or a single one, as it is."""
    if isinstance(entry, TokenLabels):
        return entry
    if hasattr(entry, "intervals") and hasattr(entry, "labels"):
        return label_tokens(source, entry.intervals, entry.labels, margin_s=margin_s)
    if isinstance(entry, tuple) and len(entry) == 2 and np.ndim(entry[0]) == 2:
        return label_tokens(source, *entry, margin_s=margin_s)
    if isinstance(entry, (list, tuple)) and entry and isinstance(entry[0], (list, tuple)):
        return label_tokens(source, entry, margin_s=margin_s)
    return entry


def _join(keys: Any) -> list[int]:
    """Group numbers: sources that share any of their keys, or a chain of them, are one group."""
    parent: dict[Hashable, Hashable] = {}

    def root(key: Hashable) -> Hashable:
        while parent.setdefault(key, key) != key:
            key = parent[key]
        return key

    tagged = [[(kind, key) for kind, key in enumerate(mine) if key is not None] for mine in keys]
    for mine in tagged:
        for key in mine[1:]:
            parent[root(key)] = root(mine[0])
    roots = [root(mine[0]) for mine in tagged]
    numbers = {key: k for k, key in enumerate(dict.fromkeys(roots))}
    return [numbers[key] for key in roots]


def _print(waveform: torch.Tensor) -> str | None:
    """What tells equal audio; None for silence, which songs share without being related."""
    return hashlib.sha256(waveform.numpy().tobytes()).hexdigest() if waveform.any() else None


def _check_size(session: Session, values: int, with_control: bool, max_gib: float) -> None:
    shape = session._adapter.model_shape()
    gib = values * (1 + with_control) * shape.width * shape.dtype.itemsize / 2**30
    if gib > max_gib:
        raise _bad(
            f"these states take {gib:.1f} GiB of memory, more than max_gib={max_gib:g}: ask for fewer layers, label fewer "
            'tokens, use level="clip", or raise max_gib',
            "max_gib",
        )


def _bad(message: str, source: str) -> ArgumentError:
    return ArgumentError(message, code="bad_argument", source=source)
