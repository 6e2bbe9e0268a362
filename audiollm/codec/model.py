"""A loaded codec: MOSS-Audio-Tokenizer v2 from a loom GGUF or a published snapshot folder."""

from __future__ import annotations

import html
import os
import threading
from pathlib import Path

import torch

from ..errors import ArgumentError
from ..vendor.moss_audio_tokenizer import CodecConfig, DecoderWeights, EncoderWeights
from ..vendor.moss_audio_tokenizer.config import MODEL_TYPE
from .capture import Capture, capture
from .codes import MAX_FRAMES, CodeSpace
from .contract import contract_from, gguf_contract, hparam, snapshot_metadata
from .device import device_description, pick_device, pick_dtype
from .doors import OTHER_DOORS, Codes2Speech, Door, Speech2Codes, refuse_unknown
from .errors import CodecError
from .gguf_file import GgufFile, Value
from .gguf_weights import absent_code, read_decoder
from .hub import cached_folder
from .snapshot import Snapshot, find_model

_TOPOLOGY = "model.graph_topology."


class Model:
    """A loaded codec. Made by `from_file` (a loom GGUF) or `from_pretrained` (a folder, a file, or a cached repository).

    `config` holds rates and widths, `code_space` what ids are legal, `decoder` the weights; the rest is the loom door's:
    `hparam`, `contract`, `capabilities`, `task`, `architecture`, `device`, `driver_source`, `path`, `codes2speech`.
    """

    def __init__(
        self,
        path: Path,
        metadata: dict[str, Value],
        decoder: DecoderWeights,
        absent: int | None,
        snapshot: Snapshot | None = None,
    ) -> None:
        self.path = path
        self.decoder = decoder
        self.code_space = CodeSpace(decoder.config.n_codebooks, decoder.config.codebook_size, absent)
        self._metadata = metadata
        self._snapshot = snapshot
        self._encoder: EncoderWeights | None = None
        self._lock = threading.Lock()

    @classmethod
    def from_file(
        cls, path: str | os.PathLike, device: str | torch.device = "", dtype: torch.dtype = torch.float32
    ) -> Model:
        """Load a loom GGUF.

        `device` is "" (a GPU where torch has one, else the CPU), "cpu", "gpu", or any name that torch knows; `dtype`
        what the weights are held in: parity is float32's.

        Raises: ModelNotFoundError `not_found`, `not_a_file`; ModelFileError `bad_weights`, `unsupported`;
        ArgumentError `bad_device`, `bad_argument`.
        """
        target, kind = pick_device(device), pick_dtype(dtype)
        file = GgufFile(path)
        absent = absent_code(file)
        decoder = read_decoder(file, absent, lambda tensor: tensor.to(target, kind))
        return cls(file.path, dict(file.metadata), decoder, absent)

    @classmethod
    def from_pretrained(
        cls,
        repo_id: str | os.PathLike,
        filename: str | None = None,
        revision: str = "main",
        cache_dir: str | os.PathLike | None = None,
        token: str | None = None,
        device: str | torch.device = "",
        *,
        dtype: torch.dtype = torch.float32,
        encoder: bool = False,
    ) -> Model:
        """Load a local folder or file, or `owner/name` out of the local Hugging Face cache; nothing is downloaded.

        A folder with config.json is a published snapshot; otherwise it must hold one GGUF, or `filename` names it.
        A snapshot's encoder is read when `speech2codes` is first used, or at once with `encoder=True`. `token` is taken
        for the loom door's sake and never used.

        Raises: as `from_file`; ModelNotFoundError `not_found` naming the path form when the cache does not hold it.
        """
        pick_device(device)
        place = Path(os.fspath(repo_id)).expanduser()
        if not os.fspath(repo_id) or not place.exists():
            place = cached_folder(os.fspath(repo_id), revision, cache_dir)
        found = find_model(place, filename) if place.is_dir() else place
        if not found.is_dir():
            return cls.from_file(found, device, dtype)
        model = cls._from_snapshot(found, device, dtype)
        if encoder:
            model.encoder  # noqa: B018  reads it now
        return model

    @classmethod
    def _from_snapshot(cls, folder: Path, device: str | torch.device, dtype: torch.dtype) -> Model:
        target, kind = pick_device(device), pick_dtype(dtype)
        snapshot = Snapshot(folder)
        decoder = snapshot.decoder(lambda tensor: tensor.to(target, kind))
        size = snapshot.config.codebook_size
        return cls(folder, snapshot_metadata(snapshot.config), decoder, size, snapshot)

    @property
    def config(self) -> CodecConfig:
        """Rates, widths and windows."""
        return self.decoder.config

    @property
    def encoder(self) -> EncoderWeights:
        """The encoder's weights, read on first use. Raises: CodecError `unsupported` where there are none."""
        with self._lock:
            if self._encoder is None:
                if self._snapshot is None:
                    raise CodecError(f"{self.path} holds no encoder", code="unsupported", source=self.path)
                table = self.decoder.quantizer.table
                self._encoder = self._snapshot.encoder(
                    self.decoder, lambda tensor: tensor.to(table.device, table.dtype)
                )
            return self._encoder

    def hparam(self, key: str, kind: str = "u32") -> int | float | str:
        """One `loom.*` value by its key without "loom.", and the kind it is stored as: "u32", "f32" or "str".

        Raises: CodecError `bad_argument` for a key that is missing or of another kind; ArgumentError for another kind.
        """
        return hparam(self._metadata, key, kind)

    @property
    def contract(self) -> dict:
        """What the file says it is: task, kinds, interface, sample_rate in Hz, channels, and whether it declares them."""
        return contract_from(self._metadata)

    @property
    def capabilities(self) -> tuple[str, ...]:
        """The doors that this model answers to."""
        has_encoder = self._snapshot is not None and self._snapshot.has_encoder
        return ("codes2speech", "speech2codes") if has_encoder else ("codes2speech",)

    @property
    def task(self) -> str:
        """The declared task, "audio-codec", or "" where the file declares none."""
        return self.contract["task"]

    @property
    def architecture(self) -> str:
        """The declared architecture."""
        return MODEL_TYPE

    @property
    def device(self) -> str:
        """The torch device that it runs on, e.g. "cpu" or "cuda:0"."""
        return str(self.decoder.quantizer.table.device)

    @property
    def device_description(self) -> str:
        """That device in words."""
        return device_description(self.decoder.quantizer.table.device)

    @property
    def dtype(self) -> torch.dtype:
        """What the weights are held in."""
        return self.decoder.quantizer.table.dtype

    @property
    def driver_source(self) -> str:
        """The file's Lua driver as text; it is never executed. A snapshot folder's describes the arguments."""
        entry = self._metadata.get("model.driver_script")
        return "" if entry is None or not isinstance(entry.value, str) else entry.value

    @property
    def has_driver(self) -> bool:
        """Whether there is a driver text."""
        return bool(self.driver_source)

    @property
    def topologies(self) -> list[str]:
        """Names of the graphs that the file carries; they are not used here."""
        return [key.removeprefix(_TOPOLOGY) for key in self._metadata if key.startswith(_TOPOLOGY)]

    @property
    def tokenizer(self) -> None:
        """A codec has no vocabulary."""
        return None

    @property
    def codes2speech(self) -> Codes2Speech:
        """Codes in, audio out."""
        return Codes2Speech(self, "codes2speech")

    @property
    def speech2codes(self) -> Speech2Codes:
        """Audio in, codes out, for a snapshot with an encoder."""
        return Speech2Codes(self, "speech2codes")

    def infer(self, **inputs: object) -> list[float]:
        """The driver's own call: `infer(codes=flat frame-major ids)` -> interleaved samples as a list of floats.

        Raises: CodesError; KeywordError for anything but `codes`.
        """
        refuse_unknown({key: value for key, value in inputs.items() if key != "codes"}, ("codes",))
        if "codes" not in inputs:
            raise ArgumentError("infer needs codes=", code="bad_argument", source="codes")
        return self.codes2speech.infer(inputs["codes"]).samples.tolist()

    def capture(
        self,
        codes: object,
        stages: object = None,
        layers: object = (),
        *,
        num_codebooks: int | None = None,
        max_frames: int | None = MAX_FRAMES,
        progress: bool | None = None,
    ) -> Capture:
        """Hidden states while decoding; see `audiollm.codec.capture`.

        Parameters: `stages`, None for all, or stage numbers (negative from the end) or names such as "decoder.4";
        `layers`, of each of them: 0 is what enters the first block, k what block k-1 hands on.

        Raises: CodesError; ArgumentError naming what there is, for a stage or layer there is not.
        """
        return capture(self, codes, stages, layers, num_codebooks, max_frames, progress)

    def __getattr__(self, name: str) -> Door:
        if name in OTHER_DOORS:
            return Door(self, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *OTHER_DOORS})

    def __repr__(self) -> str:
        space, config = self.code_space, self.config
        return (
            f"<codec.Model {self.path.name!r}: {space.n_codebooks} codebooks of {space.codebook_size} at "
            f"{config.frame_rate:g} Hz -> {config.sample_rate} Hz, {config.channels} channels; {self.device}, "
            f"{str(self.dtype).removeprefix('torch.')}>"
        )

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{stage.name}</td><td>{stage.rate:g} Hz</td><td>{stage.layers} x {stage.d_model}</td>"
            f"<td>{stage.heads} x {stage.head_dim}</td><td>{stage.context} rows, {stage.context / stage.rate:g} s</td></tr>"
            for stage in self.config.decoder
        )
        return (
            f"<p>{html.escape(repr(self))}</p><table><tr><th>stage</th><th>rate</th><th>layers x width</th><th>heads</th>"
            f"<th>window</th></tr>{rows}</table>"
        )


def contract_of(path: str | os.PathLike) -> dict:
    """What a loom GGUF of any model declares, from its header alone.

    Raises: ModelNotFoundError, ModelFileError.
    """
    return gguf_contract(GgufFile(path))
