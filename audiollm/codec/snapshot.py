"""A published snapshot folder: config.json and safetensors, read strictly.

Every tensor that the config calls for must be there with its shape, and nothing else may be; the encoder's tensors are
checked from the header but read only when asked for. Code in the folder (`auto_map`) is never imported. A folder
without any encoder tensor is a decoder.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..vendor.moss_audio_tokenizer import (
    CodecConfig,
    ConfigError,
    DecoderWeights,
    EncoderWeights,
    build_decoder,
    build_encoder,
    decoder_shapes,
    encoder_shapes,
    parse_config,
)
from ..vendor.moss_audio_tokenizer.weights import GetTensor, Place
from .errors import CodecError, ModelFileError, ModelNotFoundError
from .gguf_file import checked_model_file

MAX_JSON_BYTES = 1 << 24
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# Names of the older 24 kHz and Nano releases, as (old, new).
_OLD_NAMES = (
    (".self_attn.in_projs.0.", ".self_attn.in_proj."),
    (".self_attn.out_projs.0.", ".self_attn.out_proj."),
    (".linear1.", ".ffn.0."),
    (".linear2.", ".ffn.2."),
)
_READABLE = ("F32", "F16", "BF16", "F64")


class Snapshot:
    """A checked snapshot: `config`, and its weights on demand.

    Raises: ModelNotFoundError `not_found`, `not_a_file`; ModelFileError `bad_weights` or `unsupported`, naming the file.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        config_file = self.folder / "config.json"
        try:
            self.config: CodecConfig = parse_config(read_json(config_file))
        except ConfigError as error:
            raise ModelFileError(f"{config_file}: {error}", code="unsupported", source=config_file) from error
        self._where = self._locate()
        expected = decoder_shapes(self.config)
        encoder = encoder_shapes(self.config)
        self.has_encoder = any(name in self._where for name in encoder)
        if self.has_encoder:
            expected |= encoder
        self._check_names(expected)

    def decoder(self, place: Place) -> DecoderWeights:
        """Read what decoding needs."""
        with _Files() as files:
            return build_decoder(files.reader(self._where), self.config, place)

    def encoder(self, decoder: DecoderWeights, place: Place) -> EncoderWeights:
        """Read what encoding needs besides. Raises: CodecError `unsupported` where the folder holds no encoder."""
        if not self.has_encoder:
            raise CodecError(
                f"{self.folder} holds no encoder weights; the published snapshot has them",
                code="unsupported",
                source=self.folder,
            )
        with _Files() as files:
            return build_encoder(files.reader(self._where), self.config, decoder.quantizer, place)

    def _locate(self) -> dict[str, tuple[Path, str]]:
        """Published name -> (file, name in that file)."""
        where: dict[str, tuple[Path, str]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in self._weight_files():
            for name, (shape, dtype) in read_header(path).items():
                new = name
                for old_part, new_part in _OLD_NAMES:
                    new = new.replace(old_part, new_part)
                if new in where:
                    _fail(path, f"tensor {new} appears twice")
                if dtype not in _READABLE:
                    _fail(path, f"tensor {name} is {dtype}; read are {', '.join(_READABLE)}", "unsupported")
                where[new], self._shapes[new] = (path, name), shape
        return where

    def _weight_files(self) -> list[Path]:
        single, index = self.folder / WEIGHTS, self.folder / INDEX
        if not index.exists():
            return [checked_model_file(single)]
        table = read_json(index).get("weight_map")
        files = sorted({str(name) for name in table.values()}) if isinstance(table, Mapping) else []
        for name in files:
            if not re.fullmatch(r"[\w][\w.-]*\.safetensors", name):
                _fail(index, f"weight_map names {name!r}, which is no plain safetensors file name")
        if not files:
            _fail(index, "weight_map is missing or empty")
        return [checked_model_file(self.folder / name) for name in files]

    def _check_names(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        missing = [name for name in expected if name not in self._where]
        if missing:
            _fail(self.folder, f"tensor {missing[0]} is missing ({len(missing)} of {len(expected)} are)")
        extra = [name for name in self._where if name not in expected]
        if extra:
            _fail(self.folder, f"tensor {extra[0]} does not belong to this model ({len(extra)} do not)")
        for name, shape in expected.items():
            if self._shapes[name] != shape:
                _fail(self._where[name][0], f"tensor {name} has shape {list(self._shapes[name])}, not {list(shape)}")


class _Files(ExitStack):
    """The weight files of one load, each opened once and closed at the end."""

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[Path, Any] = {}

    def reader(self, where: Mapping[str, tuple[Path, str]]) -> GetTensor:
        """The `get` that the weights are built from."""

        def get(name: str, shape: tuple[int, ...]) -> Tensor:
            path, own = where[name]
            try:
                if path not in self._open:
                    self._open[path] = self.enter_context(safe_open(path, framework="pt"))
                tensor = self._open[path].get_tensor(own).to(torch.float32, copy=True)
            except (SafetensorError, OSError) as error:
                _fail(path, f"tensor {own} cannot be read: {error}")
            low, high = (float(v) for v in tensor.aminmax())
            if not (math.isfinite(low) and math.isfinite(high)):
                _fail(path, f"tensor {own} holds NaN or infinity")
            if tuple(tensor.shape) != shape:
                _fail(path, f"tensor {own} has shape {list(tensor.shape)}, not {list(shape)}; the file has changed")
            return tensor

        return get


def read_json(path: Path) -> dict:
    """A JSON object from a small file. Raises: ModelNotFoundError; ModelFileError `bad_weights`."""
    checked_model_file(path)
    if path.stat().st_size > MAX_JSON_BYTES:
        _fail(path, f"it is larger than {MAX_JSON_BYTES} bytes")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        _fail(path, f"it is no JSON: {error}")
    if not isinstance(value, dict):
        _fail(path, "it holds no JSON object")
    return value


def read_header(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Names of a safetensors file with shape and dtype, checked: header, offsets and sizes against the file.

    Raises: ModelFileError `bad_weights`.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        if head.startswith(b"version "):
            _fail(path, "this is a Git LFS pointer, not the weights: run `git lfs pull`, or download the file itself")
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            _fail(path, f"its header announces {length} bytes, the file has {size}")
        raw = file.read(length)
    try:
        table = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        _fail(path, f"its header is no JSON table: {error}")
    if not isinstance(table, dict):
        _fail(path, "its header is no JSON table")
    table.pop("__metadata__", None)
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            result = {}
            for name in names:
                part = file.get_slice(name)
                result[name] = (tuple(part.get_shape()), part.get_dtype())
    except (SafetensorError, OSError) as error:
        _fail(path, f"it is no whole safetensors file: {error}")
    return result


def find_model(folder: Path, filename: str | None) -> Path:
    """What to load from a folder: the named file, else the snapshot itself, else its only GGUF.

    Raises: ModelNotFoundError `not_found`.
    """
    if filename is not None:
        return checked_model_file(folder / filename)
    if (folder / "config.json").is_file():
        return folder
    ggufs = sorted(path.name for path in folder.glob("*.gguf"))
    if len(ggufs) != 1:
        has = "neither config.json nor a .gguf file" if not ggufs else f"{len(ggufs)} GGUF files: {', '.join(ggufs)}"
        cure = "" if not ggufs else "; name one with filename="
        raise ModelNotFoundError(f"{folder} holds {has}{cure}", code="not_found", source=folder)
    return folder / ggufs[0]


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name appears twice")
    return table


def _fail(path: Path, message: str, code: str = "bad_weights") -> NoReturn:
    raise ModelFileError(f"{path}: {message}", code=code, source=path)
