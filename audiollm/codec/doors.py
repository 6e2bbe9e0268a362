"""The doors of a model, one per pair of kinds: the codec opens `codes2speech`, and `speech2codes` with an encoder.

Names and behaviour follow the loom package's door, so that a script written for it runs. Every door is always there;
one that a model does not have raises UnsupportedTask naming the one it has.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from ..errors import ArgumentError, AudioError
from ..vendor.moss_audio_tokenizer import CodecState
from .audio import Audio
from .clip import Source, load_clip
from .codes import MAX_FRAMES, check_codes, check_frames, check_prefix
from .decoding import STEP_FRAMES, decode, decode_piece, encode
from .errors import CodecError, KeywordError, UnsupportedTask

if TYPE_CHECKING:
    from .model import Model

OTHER_DOORS = (
    "image2boundingbox",
    "image2class",
    "image2embeddings",
    "image2segmentationmask",
    "image2speech",
    "image2text",
    "speech2class",
    "speech2embeddings",
    "speech2image",
    "speech2speech",
    "speech2text",
    "text2class",
    "text2codes",
    "text2embeddings",
    "text2image",
    "text2speech",
    "text2text",
)


class Door:
    """A way into a model that this model does not have; the base of those that it has."""

    def __init__(self, model: Model, name: str) -> None:
        self._model = model
        self.name = name

    @property
    def supported(self) -> bool:
        """Whether this model answers to this door."""
        return self.name in self._model.capabilities

    def infer(self, *_: object, **__: object) -> object:
        """Raises: UnsupportedTask naming the door that this model has."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        contract = self._model.contract
        raise UnsupportedTask(
            f"this model is {contract['interface']} ({contract['task'] or 'audio-codec'}), not {self.name}. "
            f"`model.{contract['interface']}.infer(...)` is its door; `model.capabilities` lists what it answers to.",
            code="unsupported",
            source=self.name,
        )

    def __repr__(self) -> str:
        return f"<codec door {self.name}: {'available' if self.supported else 'not this model'}>"


class Codes2Speech(Door):
    """Codes in, stereo audio out.

    `codes` is frame-major: rows [T, n_codebooks] as lists, a numpy array or a torch tensor, or the same flattened. Rows
    narrower than the model are a prefix and are filled with the absent id where the model declares one. `num_codebooks`
    decodes only the first that many. `max_frames` is the ceiling (4096 frames, 5.5 min, is the model's own budget);
    None lifts it. `progress` None shows a bar in a terminal or notebook, True and False insist.
    """

    def infer(  # type: ignore[override]
        self,
        codes: object,
        *,
        num_codebooks: int | None = None,
        max_frames: int | None = MAX_FRAMES,
        progress: bool | None = None,
        **unknown: object,
    ) -> Audio:
        """Decode a clip: T frames -> T * samples_per_frame interleaved samples (T * 7680 for v2).

        Raises: CodesError `bad_codes` or `too_many_frames`, KeywordError; nothing runs before the codes are checked.
        """
        refuse_unknown(unknown, ("num_codebooks", "max_frames", "progress"))
        model = self._model
        table = check_codes(codes, model.code_space, max_frames, num_codebooks)
        samples = np.empty(len(table) * model.config.samples_per_frame, dtype=np.float32)
        at = 0
        for piece in decode(model.decoder, table, STEP_FRAMES, progress):
            samples[at : at + len(piece)] = piece
            at += len(piece)
        return Audio(samples, model.config.sample_rate, model.config.channels)

    def stream(
        self,
        codes: object,
        chunk_frames: int = 100,
        *,
        num_codebooks: int | None = None,
        max_frames: int | None = MAX_FRAMES,
        progress: bool | None = None,
        **unknown: object,
    ) -> Iterator[Audio]:
        """Decode a clip `chunk_frames` frames at a time; joined, the pieces are what `infer` returns.

        Memory is flat: each layer carries the window it needs. The codes are checked when this is called.

        Raises: as `infer`; ArgumentError for a chunk that is no whole number of frames.
        """
        refuse_unknown(unknown, ("chunk_frames", "num_codebooks", "max_frames", "progress"))
        whole = isinstance(chunk_frames, (int, np.integer)) and not isinstance(chunk_frames, bool)
        if not whole or chunk_frames < 1:
            raise ArgumentError(
                f"chunk_frames is {chunk_frames!r}, not a whole number of frames",
                code="bad_argument",
                source="chunk_frames",
            )
        model = self._model
        table = check_codes(codes, model.code_space, max_frames, num_codebooks)
        pieces = decode(model.decoder, table, int(chunk_frames), progress)
        return (Audio(piece, model.config.sample_rate, model.config.channels) for piece in pieces)

    def live(self, *, num_codebooks: int | None = None, max_frames: int | None = MAX_FRAMES) -> LiveDecoder:
        """A decoder to push frames into as they come, for codes that are still being generated."""
        return LiveDecoder(self._model, num_codebooks, max_frames)


class LiveDecoder:
    """Push rows of codes, get their audio; the windows are carried from push to push.

    An interrupted push leaves windows of half a piece, so the decoder refuses to go on; the model itself is untouched.
    """

    def __init__(self, model: Model, num_codebooks: int | None, max_frames: int | None) -> None:
        if num_codebooks is not None:
            check_prefix(num_codebooks, model.code_space)
        self._model, self._num_codebooks, self._max_frames = model, num_codebooks, max_frames
        self._state = CodecState(model.decoder.stages)
        self._whole = True
        self.frames = 0

    def push(self, codes: object) -> Audio:
        """The frames that follow those pushed before -> their audio.

        Raises: CodesError, with frames counted from the start of this push; CodecError after an interrupted push.
        """
        if not self._whole:
            raise CodecError(
                "an earlier push was interrupted; start a new live() decoder", code="bad_argument", source="live"
            )
        model = self._model
        table = check_codes(codes, model.code_space, None, self._num_codebooks)
        check_frames(self.frames + len(table), self._max_frames)
        self._whole = False
        pieces = [
            decode_piece(model.decoder, table[start : start + STEP_FRAMES], self._state)
            for start in range(0, len(table), STEP_FRAMES)
        ]
        self._whole = True
        self.frames += len(table)
        return Audio(np.concatenate(pieces), model.config.sample_rate, model.config.channels)

    @property
    def nbytes(self) -> int:
        """Bytes of carried windows; flat once every window is full."""
        return self._state.nbytes


class Speech2Codes(Door):
    """Audio in, codes out: the half that loom exports leave out; a snapshot folder with encoder weights has it."""

    def infer(  # type: ignore[override]
        self, clip: Source, *, sample_rate: int | None = None, progress: bool | None = None, **unknown: object
    ) -> np.ndarray:
        """Encode a path, Audio, Waveform, or an array [frames] or [frames, channels] with its `sample_rate` in Hz.

        One channel is duplicated; other rates are resampled. Returns codes int64 [T, n_codebooks] of the published
        length, T = floor(samples of all channels / samples_per_frame): a last part frame (80 ms) is dropped.

        Raises: AudioError as reading a source does, `too_short` below one frame; UnsupportedTask for a model without
        an encoder; KeywordError.
        """
        if not self.supported:
            self._refuse()
        refuse_unknown(unknown, ("sample_rate", "progress"))
        config = self._model.config
        samples = load_clip(clip, config.sample_rate, config.channels, sample_rate)
        frames = len(samples) // config.samples_per_frame
        if not frames:
            raise AudioError(
                f"the clip has {len(samples) // config.channels} samples at {config.sample_rate} Hz, one frame of codes is "
                f"{config.samples_per_frame // config.channels}",
                code="too_short",
                source="clip",
            )
        return encode(self._model.encoder, samples, STEP_FRAMES, progress)

    def _refuse(self) -> NoReturn:
        raise UnsupportedTask(
            "this model has no encoder: a loom GGUF holds the decoder alone. Load the published snapshot folder with "
            "Model.from_pretrained to encode; `model.codes2speech.infer(...)` is the door of this one.",
            code="unsupported",
            source=self.name,
        )


def refuse_unknown(unknown: dict, known: tuple[str, ...]) -> None:
    """Raises: KeywordError for a keyword that the call does not take, with the nearest that it does."""
    for word in unknown:
        close = difflib.get_close_matches(word, known, n=1)
        hint = (
            f"; did you mean {close[0]}?" if close else f"; besides its input it takes {', '.join(known) or 'nothing'}"
        )
        raise KeywordError(f"unexpected keyword {word!r}{hint}", code="bad_argument", source=word)
