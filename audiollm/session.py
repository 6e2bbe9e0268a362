"""A loaded model and what can be asked of it: prepare -> forward / extract / generate.

Letters: B requests, L padded prompt width, U_i audio tokens of one source, D language width, V vocabulary, n decoder
blocks. Words for layers: layer 0 is the decoder's input with the audio already in it, layer k what block k-1 hands on
to block k, layer n is after the final norm; negative numbers count from the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from transformers import PreTrainedModel, StoppingCriteriaList
from transformers.modeling_outputs import CausalLMOutputWithPast

from .batch import AudioEmbedding, PreparedBatch, TokenCount
from .errors import ArgumentError, SessionBusyError
from .families import Family
from .generation import (
    Generation,
    OnText,
    Stop,
    Watcher,
    budget,
    check_callbacks,
    check_seed,
    cut_at_end,
    library_config,
    profile_of,
    seeded,
    without_false_reminder,
)
from .hooks import Halt, Keep, Reading, read_layers
from .observe import LIMIT_BYTES, Observation, Observing
from .points import Point, resolve, select
from .request import Request
from .rows import Selection
from .snapshot import identity

if TYPE_CHECKING:
    from .calls import Context
    from .edits import Edit, EditFunction, Editing

Result = TypeVar("Result")


class Session:
    """A model, its processor and the family they belong to. Made by `load_model`.

    `model` is the library's torch module, for advanced calls and hooks of your own; `processor` gives its tokenizer and
    feature extractor; `family` is "music_flamingo" or "moss_music". A Session keeps no state between calls, and runs one at
    a time: a second one meanwhile raises SessionBusyError.
    """

    def __init__(
        self, model: PreTrainedModel, processor: Any, adapter: Family, folder: str | Path | None = None
    ) -> None:
        self.model = model
        self.processor = processor
        self.folder = None if folder is None else Path(folder)
        self._adapter = adapter
        self._running: list[object] = []
        self._contexts: list[Context] = []

    @property
    def family(self) -> str:
        """The family's name."""
        return self._adapter.name

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return next(self.model.parameters()).dtype

    @property
    def n_layers(self) -> int:
        """n, the number of decoder blocks; layers are 0..n."""
        return self._adapter.model_shape().n_blocks

    @property
    def context(self) -> int:
        """Tokens that a prompt and its answer share."""
        return self._adapter.context

    @cached_property
    def identity(self) -> str | None:
        """Which model the snapshot folder holds, see `audiollm.snapshot.identity`; None for a session without one."""
        return None if self.folder is None else identity(self.folder)

    def points(self, pattern: str = "*") -> tuple[Point, ...]:
        """The named places of this model that match a pattern, with shapes; see `audiollm.points` for what they are.

        `*` and `?` match; brackets stand for themselves: `points("resid*")`, `points("attn_out[1?]")`.
        """
        return select(self._adapter.points(), pattern)

    def observe(
        self,
        points: str | Sequence[str],
        tokens: str | Sequence[int] | None = None,
        seconds: tuple[float, float] | None = None,
        source: int | Sequence[int] | None = None,
        device: str | torch.device | None = "cpu",
        dtype: torch.dtype | None = None,
        batch: PreparedBatch | None = None,
        limit_bytes: int = LIMIT_BYTES,
        must_fire: bool = True,
    ) -> Observing:
        """Keep what points compute, around any call: `with session.observe("resid[3]", source=0) as seen: ...`.

        `points` are names, patterns, or module paths; `tokens`, `seconds` and `source` choose rows (see
        `audiollm.rows.Selection`); `device` None leaves values where they are, `dtype` None as they are. Afterwards
        `seen["resid[3]"]` is an Activation: `values` [R, ...] and `rows`, what each is and its seconds; generated
        tokens come after the prompt's rows, with `rows.step`. A direct `session.model(...)` needs its `batch` for
        audio points and for choosing rows. Costs one copy of the chosen rows a point.

        Raises: ArgumentError for unknown names with the closest three, for a selection that fits nothing, `too_large`
        before the model runs where the prompt's rows, with what earlier calls of the block kept, pass `limit_bytes`; at the
        end of the block for a point that never fired, unless `must_fire=False`.

        >>> from audiollm import Request, demo
        >>> session = demo.load("moss_music")
        >>> request = Request("Which instrument?", [demo.clips()["bass"]])
        >>> with session.observe("resid[3]", seconds=(1, 2)) as seen:
        ...     answers = session.generate([request], max_new_tokens=2)
        >>> seen["resid[3]"].values.shape, float(seen["resid[3]"].rows.start_s[0])
        (torch.Size([13, 64]), 0.96)
        """
        chosen = Selection.of(tokens, seconds, source)
        found = resolve(self._adapter.points(), points, self.model)
        return Observing(self, found, chosen, batch, device, dtype, limit_bytes, must_fire)

    def capture(
        self,
        batch: PreparedBatch,
        points: str | Sequence[str],
        tokens: str | Sequence[int] | None = None,
        seconds: tuple[float, float] | None = None,
        source: int | Sequence[int] | None = None,
        device: str | torch.device | None = "cpu",
        dtype: torch.dtype | None = None,
        limit_bytes: int = LIMIT_BYTES,
        grad: bool = False,
    ) -> Observation:
        """What points compute for a batch, in one prefill that stops once every one of them was seen.

        >>> from audiollm import Request, demo
        >>> session = demo.load("moss_music")
        >>> batch = session.prepare([Request("Which instrument?", [demo.clips()["bass"]])])
        >>> session.capture(batch, ["projected", "resid[1]"], source=0)["projected"]
        Activation(projected: [150, 64] float32, Rows(150: 150 audio, 0 text, 0 generated))

        Parameters and result as `observe`; `logits` are of every chosen row. With a module path of the encoder, which may
        run more than once, the prefill goes to its end. With `grad=True` values keep their graph.
        Raises: as `observe`; SessionBusyError.
        """
        self._check_batch(batch)
        found = resolve(self._adapter.points(), points, self.model)
        chosen = Selection.of(tokens, seconds, source)
        if tokens == "steps":
            raise ArgumentError(
                "a capture is of a prompt, which has no generated tokens; observe a generation instead",
                code="bad_argument",
                source="tokens",
            )
        seeing = Observing(self, found, chosen, batch, device, dtype, limit_bytes, halt=True)
        kept = self._kept_logits(seeing, batch)

        def run() -> None:
            try:
                self._prefill(batch, logits_to_keep=kept)
            except Halt:
                return

        with seeing:
            self._alone(grad, run, batch, None)
        return seeing.result()

    def _kept_logits(self, seeing: Observing, batch: PreparedBatch) -> int | torch.Tensor:
        """Columns that the head must run on: those chosen, where logits are asked for, else the last."""
        if not any(point.name == "logits" for point in seeing.points):
            return 1
        columns = seeing.columns_of(batch)
        return torch.from_numpy(columns).to(self.device)

    def edit(
        self,
        edits: Mapping[str, Edit | EditFunction],
        tokens: str | Sequence[int] | None = None,
        seconds: tuple[float, float] | None = None,
        source: int | Sequence[int] | None = None,
        steps: str | Iterable[int] | None = None,
        batch: PreparedBatch | None = None,
        must_fire: bool = True,
    ) -> Editing:
        """Change what points compute, around any call: `with session.edit({"resid[3]": edits.zero()}, source=0): ...`.

        `edits` maps names or patterns to functions (values [m, ...], rows) -> values, or to `audiollm.edits`; the
        other parameters choose rows as in `observe`. Applies to the prompt; `steps` names generated tokens to edit as well,
        "all" or numbers from 1. Blocks nest, the first entered applies first, and are undone in any order of leaving.

        Raises: ArgumentError as `observe`, for an edit that is not a function, for one place under two names, and while the
        model runs for an edit that returns another shape than it was given.

        >>> from audiollm import Request, demo, edits
        >>> session = demo.load("moss_music")
        >>> batch = session.prepare([Request("Which instrument?", [demo.clips()["bass"]])])
        >>> with session.edit({"resid[3]": edits.zero()}, seconds=(1, 2)):
        ...     seen = session.capture(batch, "resid[3]")["resid[3]"]
        >>> int((seen.values == 0).all(1).sum())
        13
        """
        from .edits import Editing

        if not isinstance(edits, Mapping):
            raise ArgumentError(
                f"edits is a {type(edits).__name__}; pass {{point: edit}}", code="bad_argument", source="edits"
            )
        names = {name: resolve(self._adapter.points(), name, self.model) for name in edits}
        if not names:
            raise ArgumentError("edits is empty; pass {point: edit}", code="bad_argument", source="edits")
        chosen = Selection.of(tokens, seconds, source)
        return Editing(self, edits, names, chosen, batch, steps, must_fire)

    def prepare(self, requests: Sequence[Request]) -> PreparedBatch:
        """Decode, tokenize and pad requests, 0 to 5 sources each in any mixture, in order.

        A request's result does not depend on its neighbours. Decoding, mel and tokenizing run on the CPU; the result's
        `inputs` lie on the model's device.

        Raises: ArgumentError for something other than a list of Requests; AudioError with code `not_found`,
        `not_a_file`, `unsupported`, `corrupt`, `empty`, `non_finite`, `too_short` or `bad_rate`; RequestError with code
        `control_token` or `too_long`. Warns where a source is cut to the model's longest audio.
        """
        return self._adapter.prepare(requests, self.device)

    def count_tokens(self, request: Request) -> TokenCount:
        """Tokens that a request would take, and what the context leaves; nothing is decoded.

        Lengths are those that the headers tell: exact for all but MP3. A request that is too long is counted as well.
        Raises: as `prepare`, but for what only decoding finds, and not for `too_long`.

        >>> from audiollm import Request, demo
        >>> demo.load("moss_music").count_tokens(Request("Which instrument?", [demo.clips()["bass"]])).sources
        (150,)
        """
        if not isinstance(request, Request):
            raise ArgumentError(
                f"request is a {type(request).__name__}; pass Request(prompt, audios)",
                code="bad_argument",
                source="request",
            )
        return self._adapter.count_tokens(request)

    def extract_audio_embeddings(self, batch: PreparedBatch, grad: bool = False) -> list[AudioEmbedding]:
        """What the audio tower and projector make of each source; the language model does not run.

        Returns one AudioEmbedding a source, in request then source order: `raw` [U_i, audio width] (for Music Flamingo
        before rotary time), `projected` [U_i, D], no padding, pooling or normalisation, on the model's device and in
        its dtype. With `grad=True` the graph is kept whole from `batch.inputs` on.

        Raises: ArgumentError for a batch of another model; SessionBusyError.
        """
        self._check_batch(batch)
        return self._alone(grad, lambda: self._adapter.embed_audio(batch), batch)

    def extract_contextual_embeddings(
        self, batch: PreparedBatch, layers: Sequence[int] = (-1,), grad: bool = False
    ) -> list[dict[int, torch.Tensor]]:
        """Language-model states at the audio positions, from one complete causal prefill without cache.

        Returns for each source, in request then source order, a dict keyed by the layer numbers as asked: [U_i, D] on
        the model's device. Only these rows are kept (`batch.nbytes(layers)` tells how much). Each value is what the
        next block receives (layer k < n is the point `resid[k]`, layer n is `final`; see `audiollm.points` for the table),
        so it never depends on what was called or hooked before. Blocks above the deepest asked
        layer and the head are not run: hooks of yours up there do not fire.

        Raises: ArgumentError naming the range for a layer outside 0..n or -(n+1)..-1, and for a batch of another model;
        SessionBusyError.
        """
        self._check_batch(batch)
        numbers = {layer: batch.model_shape.layer(layer) for layer in self._checked_layers(layers)}
        found: list[dict[int, torch.Tensor]] = [{} for _ in batch.slots]
        places = [(slot.sample_index, slot.token_positions.to(self.device)) for slot in batch.slots]

        def keep(layer: int, states: torch.Tensor) -> None:
            for (row, columns), mine in zip(places, found, strict=True):
                mine[layer] = states[row, columns.to(states.device)]

        if batch.slots and numbers:
            deepest = max(numbers.values())
            reading = self._reading(numbers.values(), keep, halt_after=deepest)
            self._alone(grad, lambda: read_layers(lambda: self._prefill(batch, logits_to_keep=0), reading), batch)
        return [{asked: mine[layer] for asked, layer in numbers.items()} for mine in found]

    def forward(
        self, batch: PreparedBatch, output_hidden_states: bool = False, grad: bool = False, logits_to_keep: int = 1
    ) -> CausalLMOutputWithPast:
        """One prefill without cache, to the logits of the last position or the last `logits_to_keep`.

        Returns the library's ModelOutput with `logits` [B, logits_to_keep, V] and, if asked, `hidden_states`, n + 1 tensors
        [B, L, D] read as in `extract_contextual_embeddings`; rows of padding hold values without meaning. Logits of every
        position of a long prompt are gigabytes; `session.capture(batch, "logits", ...)` takes chosen ones.

        Raises: ArgumentError for a batch of another model or a `logits_to_keep` outside 1..L; SessionBusyError.
        """
        self._check_batch(batch)
        if (
            isinstance(logits_to_keep, bool)
            or not isinstance(logits_to_keep, int)
            or not 1 <= logits_to_keep <= batch.width
        ):
            raise ArgumentError(
                f"logits_to_keep is {logits_to_keep!r}; pass 1..{batch.width}",
                code="bad_argument",
                source="logits_to_keep",
            )
        if not output_hidden_states:
            out = self._alone(grad, lambda: self._prefill(batch, logits_to_keep), batch, logits_to_keep)
            return CausalLMOutputWithPast(logits=out.logits)
        states: dict[int, torch.Tensor] = {}
        every = range(self.n_layers + 1)
        reading = self._reading(every, states.__setitem__, head_rows=slice(-logits_to_keep, None))
        out = self._alone(
            grad, lambda: read_layers(lambda: self._prefill(batch, logits_to_keep=0), reading), batch, logits_to_keep
        )
        assert out is not None  # nothing halts a reading without `halt_after`
        return CausalLMOutputWithPast(logits=out.logits, hidden_states=tuple(states[k] for k in every))

    def generate(
        self,
        requests: Sequence[Request],
        profile: str = "paper_reference",
        max_new_tokens: int | None = None,
        seed: int | None = None,
    ) -> list[str]:
        """Answers to requests as text, in order; parameters as `generations`, which see. Raises: as that."""
        return [answer.text for answer in self.generations(requests, profile, max_new_tokens, seed=seed)]

    def generations(
        self,
        requests: Sequence[Request],
        profile: str = "paper_reference",
        max_new_tokens: int | None = None,
        on_text: OnText | None = None,
        stop: Stop | None = None,
        seed: int | None = None,
    ) -> list[Generation]:
        """Answers to requests, in order, each with its token ids and why it ended.

        `profile` "paper_reference" is greedy with repetition penalty 1; "generic_sampled" samples (Music Flamingo:
        temperature 0.7, top_p 0.9; MOSS-Music: 1.0 and 0.8; top_k 50) from one stream seeded a call with `seed`, by
        default 3407, and gives the caller's random state back. Both allow 16,384 new tokens; `max_new_tokens`
        overrides that, and what the context leaves beside the widest padded prompt bounds it, with a warning.
        `on_text(request_index, text)` is called with new text, in whole characters; `stop`, a threading.Event or a
        function, is asked after every token.

        Raises: as `prepare`; ArgumentError for an unknown profile, a budget that is not positive, a seed that is no whole
        number in 0..2**63-1 or where nothing is sampled; RequestError `too_long` where the context has no room for an
        answer; SessionBusyError.
        """
        chosen = profile_of(profile, self._adapter.profiles)
        check_callbacks(on_text, stop)
        check_seed(seed, chosen)
        batch = self.prepare(requests)
        tokens = budget(chosen, max_new_tokens, batch.width, self.context)
        settings = chosen.settings(tokens, self._adapter.end_id, self._adapter.pad_id)
        if seed is not None:
            settings["seed"] = seed
        watcher = Watcher(batch.width, self._adapter.end_id, self._text, on_text, stop)

        def run() -> torch.Tensor:
            return self.model.generate(
                **batch.inputs,
                generation_config=library_config(settings),
                stopping_criteria=StoppingCriteriaList([watcher]),
            )

        stream = settings.get("seed")
        ids = self._alone(False, lambda: without_false_reminder(lambda: seeded(stream, self.device, run)), batch)
        watcher.finish()
        rows = ids[:, batch.width :].tolist()
        return [self._generation(row, batch, b, settings, watcher.stopped) for b, row in enumerate(rows)]

    def _generation(self, row: list[int], batch: PreparedBatch, b: int, settings: dict, stopped: bool) -> Generation:
        kept, ended = cut_at_end(row, self._adapter.end_id)
        reason = "stop" if ended else "stopped" if stopped else "length"
        return Generation(
            text=self._text(kept),
            token_ids=tuple(kept),
            finish_reason=reason,
            prompt_width=batch.width,
            prompt_tokens=len(batch.prompts[b]),
            settings=MappingProxyType(settings),
        )

    def _text(self, ids: list[int]) -> str:
        return self.processor.tokenizer.decode(ids, skip_special_tokens=True)

    def _alone(
        self, grad: bool, work: Callable[[], Result], batch: PreparedBatch, logits_kept: int | None = 1
    ) -> Result:
        """Run one call on a batch that keeps so many logits a request, which open blocks are told.

        A second one at the same time raises SessionBusyError.

        The session is free again and the caller's grad mode back whenever this is left, interrupts included: what
        could be cut short is done twice. Without `grad` it is no_grad, not inference_mode: what is extracted may be
        trained on, which inference tensors refuse.
        """
        me, before = object(), torch.is_grad_enabled()
        try:
            try:
                self._running.append(me)
                if self._running[0] is not me:
                    raise SessionBusyError(
                        "this Session is in the middle of another call; wait until it returns (calls from another thread "
                        "or from inside a hook cannot nest)",
                        code="busy",
                        source="session",
                    )
                torch.set_grad_enabled(grad)
                for context in tuple(self._contexts):
                    if not context.asleep:
                        context.begin(batch, logits_kept)
                return work()
            finally:
                self._leave(me, before)
        finally:
            self._leave(me, before)

    def _leave(self, me: object, grad: bool) -> None:
        torch.set_grad_enabled(grad)
        if me in self._running:
            self._running.remove(me)

    def _prefill(self, batch: PreparedBatch, logits_to_keep: int | torch.Tensor) -> CausalLMOutputWithPast:
        """The model on a whole batch, positions counted from each row's first real token as generation does."""
        mask = batch.inputs["attention_mask"]
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        return self.model(**batch.inputs, position_ids=positions, use_cache=False, logits_to_keep=logits_to_keep)

    def _reading(self, layers: Iterable[int], keep: Keep, **how: Any) -> Reading:
        adapter = self._adapter
        return Reading(adapter.blocks(), adapter.decoder(), adapter.head(), list(layers), keep, **how)

    def _check_batch(self, batch: object) -> None:
        """Refuse what this model did not prepare: another family's inputs would run, and be wrong."""
        if not isinstance(batch, PreparedBatch):
            raise ArgumentError(
                f"batch is a {type(batch).__name__}; pass what session.prepare(requests) returns",
                code="bad_argument",
                source="batch",
            )
        mine, its = self._adapter.model_shape(), batch.model_shape
        if (mine.family, mine.n_blocks, mine.width) != (its.family, its.n_blocks, its.width):
            raise ArgumentError(
                f"the batch was prepared for a {its.family} of {its.n_blocks} blocks of width {its.width}, this is "
                f"{self!r}; prepare the requests with this session",
                code="bad_argument",
                source="batch",
            )

    def _checked_layers(self, layers: Sequence[int]) -> Sequence[int]:
        if isinstance(layers, (int, str)) or not hasattr(layers, "__iter__"):
            raise ArgumentError(
                f"layers is {layers!r}; pass a sequence, such as (0, 8, -1)", code="bad_argument", source="layers"
            )
        return list(layers)

    def __repr__(self) -> str:
        shape = self._adapter.model_shape()
        return f"Session({self.family}, {shape.n_blocks} blocks of width {shape.width}, {self.device}, {self.dtype})"
