"""The tensors of a loom GGUF, found by role.

The exporter flattens torch names into one namespace (every one of ``%./-+$#@!&*()[]{}|<>?;:`` becomes `_`), splits
in_proj into q, k and v, stores equal tensors once with aliases, and shortens names of 64 or more characters to 30 + `_`
+ 6 hex digits of an MD5 + `_` + 20. A role is matched from `decoder_` on, whatever stands before it.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Mapping

import torch
from torch import Tensor

from ..vendor.moss_audio_tokenizer import CodecConfig
from .gguf_file import GgufFile, TensorInfo

_LOG = logging.getLogger(__name__)

NAME_LIMIT = 64
_SYMBOLS = str.maketrans(dict.fromkeys("%./-+$#@!&*()[]{}|<>?;:", "_"))
# Tensors of the graph that hold no weights: constants and zero biases.
_HELPERS = re.compile(
    r"linear_\d+_bias_\d+|neg_const|minus_one|.*decoder_offsets"
    r"|.*decoder_stages_\d+_(ones_[pB]|key_block_offsets|window_mask|inv_freq|scale)"
)
_ZERO_BIAS = re.compile(r"linear_\d+_bias_\d+")
# Aliases may make a small file stand for a large model; past this many times its own size it is refused.
_MAX_GROWTH = 16


class Names:
    """Tensor names with aliases resolved, and where each published name went."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.info = _with_aliases(file)
        self.used: set[str] = set()
        self._long: dict[str, str] = {}
        self._tails: dict[str, list[str]] = {}
        for name in self.info:
            at = re.search(r"(?:^|_)decoder_", name)
            if at:
                self._tails.setdefault(name[at.start() :].removeprefix("_"), []).append(name)
        self.prefix = self._find_prefix()

    def _find_prefix(self) -> str:
        prefixes = {
            name[: -len(tail)]
            for tail, names in self._tails.items()
            for name in names
            if re.fullmatch(r"decoder_\d+_input_proj_weight", tail)
        }
        if len(prefixes) != 1:
            has = "none" if not prefixes else f"several: {sorted(prefixes)[:4]}"
            self.file.fail(
                f"no single decoder: the prefix of `decoder_<i>_input_proj_weight` is needed once, it has {has}",
            )
        return prefixes.pop()

    def tails(self, pattern: str) -> list[re.Match]:
        """Matches of `pattern` against every name from its first `decoder_` on."""
        return [match for tail in self._tails if (match := re.fullmatch(pattern, tail))]

    def find(self, *tails: str) -> TensorInfo | None:
        """The tensor of the first of several spellings that the file has; None where it has none."""
        for tail in tails:
            names = self._tails.get(tail, [])
            if len(names) > 1:
                self.file.fail(f"tensors {names[0]} and {names[1]} have the same role")
            if names:
                self.used.add(names[0])
                return self.info[names[0]]
        return None

    def require(self, *tails: str, published: str = "") -> TensorInfo:
        """As `find`, also by the shortened form of the name. Raises: ModelFileError naming what is missing."""
        info = self.find(*tails)
        if info is not None:
            return info
        for tail in tails:
            short = self._long.get(tail) or self._shortened(tail, published)
            if short is not None:
                self._long[tail] = short
                self.used.add(short)
                return self.info[short]
        graph = "_loom_" if re.match(r"decoder_(stages|table|output_proj|offsets)", tails[0]) else ""
        self.file.fail(f"tensor {self.prefix}{graph}{tails[0]} is missing")

    def _shortened(self, tail: str, published: str) -> str | None:
        """The shortened form of a long name; without its digest only where a single tensor fits."""
        full = self.prefix + tail
        if len(full) < NAME_LIMIT:
            return None
        for text in (full, self.prefix.replace("_", ".") + published):
            short = shorten(full, text)
            if short in self.info:
                return short
        pattern = re.compile(re.escape(full[:30]) + "_[0-9a-f]{6}_" + re.escape(full[-20:]))
        fits = [name for name in self.info if name not in self.used and pattern.fullmatch(name)]
        if len(fits) > 1:
            return self._by_order(tail, fits)
        return fits[0] if fits else None

    def _by_order(self, tail: str, fits: list[str]) -> str | None:
        """Several shortened names with digests of something else: the exporter writes layers in order."""
        layer = re.search(r"_layers_(\d+)_", tail)
        if layer is None:
            return None
        _LOG.warning("%s: %s is one of %s; taken in the order of the file", self.file.path, tail, fits)
        return min(fits, key=lambda name: self.info[name].start)

    def fetch(self, published: str, shape: tuple[int, ...]) -> Tensor:
        """The values of a tensor by its published name, with exactly that shape."""
        flat = published.translate(_SYMBOLS)
        if published.endswith("self_attn.in_proj.weight"):
            return self._fetch_qkv(flat, shape)
        spellings = (
            flat,
            flat.replace("_ffn_0_", "_linear1_").replace("_ffn_2_", "_linear2_"),
            flat.replace("_self_attn_out_proj_", "_self_attn_out_projs_0_"),
        )
        return self.values(self.require(*dict.fromkeys(spellings), published=published), shape)

    def _fetch_qkv(self, flat: str, shape: tuple[int, ...]) -> Tensor:
        whole = self.find(flat, flat.replace("_in_proj_", "_in_projs_0_"))
        if whole is not None:
            return self.values(whole, shape)
        decoder, layer = map(int, re.findall(r"decoder_(\d+)_transformer_layers_(\d+)_", flat)[0])
        ordinal = self.stage_indices.index(decoder)
        parts = [self.require(f"decoder_stages_{ordinal}_qkv_{layer}_{part}_weight") for part in range(3)]
        return torch.cat([self.values(part, (shape[1], shape[1])) for part in parts])

    @property
    def stage_indices(self) -> list[int]:
        """The numbers of the published decoder modules that are transformers (0, 2, 4 ...)."""
        return sorted({int(match[1]) for match in self.tails(r"decoder_(\d+)_(?:input|output)_proj_weight")})

    def values(self, info: TensorInfo, shape: tuple[int, ...]) -> Tensor:
        """A tensor's values. Raises: ModelFileError when its shape is another."""
        if info.shape != shape:
            self.file.fail(f"tensor {info.name} has shape {list(info.shape)}, not {list(shape)}")
        return self.file.read(info.name)

    def check_size(self, config: CodecConfig) -> None:
        """Refuse a file that aliases itself into a model far larger than it is."""
        weights = config.n_codebooks * (config.codebook_size + 1) * config.rvq_dim
        for stage in config.decoder:
            weights += stage.layers * (4 * stage.d_model**2 + 2 * stage.d_model * stage.ff)
            weights += stage.d_model * (stage.input_dim + stage.output_dim)
        if weights * 4 > max(self.file.size, 1 << 22) * _MAX_GROWTH:
            self.file.fail(f"{weights} weights are announced by a file of {self.file.size} bytes")

    def check_leftovers(self) -> None:
        """Biases that are not zero mean another architecture; anything else that is unknown is worth a word."""
        for name in sorted({info.name for name, info in self.info.items() if _ZERO_BIAS.fullmatch(name)}):
            if bool(self.file.read(name).any()):
                self.file.fail(f"tensor {name} is a bias that is not zero; v2 has none", "unsupported")
        used = {self.info[name].name for name in self.used}
        unknown = [name for name in self.file.tensors if name not in used and not _HELPERS.fullmatch(name)]
        if unknown:
            _LOG.warning("%s: %d tensors are not used, %s first", self.file.path, len(unknown), unknown[0])


def shorten(name: str, digest_of: str | None = None) -> str:
    """The exporter's form of a name of 64 characters or more."""
    digest = hashlib.md5((digest_of or name).encode(), usedforsecurity=False).hexdigest()
    return f"{name[:30]}_{digest[:6]}_{name[-20:]}"


def _with_aliases(file: GgufFile) -> Mapping[str, TensorInfo]:
    """Tensors by name, with `loom.tensor_alias.names[i]` standing for `.targets[i]`."""
    arrays = []
    for word in ("names", "targets"):
        key = f"loom.tensor_alias.{word}"
        entry = file.metadata.get(key)
        value: object = () if entry is None else entry.value
        if not isinstance(value, tuple):
            file.fail(f"{key} is not an array of strings")
        arrays.append(value)
    aliases, targets = arrays
    if len(aliases) != len(targets):
        file.fail(f"loom.tensor_alias has {len(aliases)} names for {len(targets)} targets")
    table = dict(file.tensors)
    for alias, target in zip(aliases, targets, strict=True):
        if alias in table:
            file.fail(f"alias {alias} stands for two tensors")
        if target not in file.tensors:
            file.fail(f"alias {alias} stands for {target}, which the file does not have")
        table[alias] = file.tensors[target]
    return table
