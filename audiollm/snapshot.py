"""A local model folder: read it, check it, load it strictly.

Nothing here reaches the network, runs code from the folder, or unpickles anything: `config.json` is parsed as JSON,
weights are safetensors. The names, shapes and dtypes in the weight files are compared with the model's before a
tensor is read; then an empty model (on torch's meta device) is filled one tensor at a time, so that there is one copy
of the weights in memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING

import torch

from .errors import SnapshotError
from .paths import local_path
from .weights import FLOATS, Entry, copied, opened, read_entries

if TYPE_CHECKING:
    from transformers import PreTrainedModel

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# What `identity` reads beside the weights: all that decides how a request becomes ids and mel.
_IDENTITY_FILES = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "preprocessor_config.json", "processor_config.json", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip
_IDENTITY_PLACES, _IDENTITY_BYTES = 16, 64 << 10


@dataclass(frozen=True)
class Snapshot:
    """A model folder whose configuration has been read: `folder`, and `config` as the JSON object it holds."""

    folder: Path
    config: dict = field(repr=False)

    @classmethod
    def open(cls, folder: str | Path) -> Snapshot:
        """Read a folder's `config.json`.

        Raises: SnapshotError `not_found` where it is no folder (a hub name is not looked up), `bad_weights` where the
        configuration is missing or unreadable.
        """
        path = local_path(folder, "local_snapshot")
        if not os.path.isdir(path):  # noqa: PTH112  unlike Path.is_dir, it takes names that no file system takes
            raise SnapshotError(
                f"{folder} is not a folder; give the path of a local snapshot. Nothing is downloaded here: fetch a "
                "model first, for example with `hf download NAME --local-dir FOLDER`",
                code="not_found",
                source=folder,
            )
        config = read_json(path / "config.json")
        if not isinstance(config.get("model_type"), str):
            raise SnapshotError(
                f"{path / 'config.json'} has no model_type; is this a model folder?",
                code="bad_weights",
                source=path / "config.json",
            )
        return cls(path, config)

    @property
    def model_type(self) -> str:
        """The `model_type` of config.json."""
        return self.config["model_type"]

    def weight_files(self) -> tuple[Path, ...]:
        """The safetensors files of the snapshot, in order of name.

        Raises: SnapshotError where there are none, where an index and a single file compete, or where the index names
        a file outside the folder.
        """
        index, single = self.folder / INDEX, self.folder / SINGLE
        if index.is_file() and single.is_file():
            raise self._bad(f"holds both {INDEX} and {SINGLE}; remove the one that is out of date", self.folder)
        if single.is_file() or single.is_symlink():
            return (single,)
        if index.is_file():
            return tuple(self.folder / name for name in sorted(set(self._weight_map().values())))
        others = sorted(p.name for p in self.folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        hint = f"; {others[0]} is a pickle and is never read: convert it to safetensors" if others else ""
        raise self._bad(f"holds neither {INDEX} nor {SINGLE}{hint}", self.folder)

    def entries(self) -> dict[str, tuple[Path, Entry]]:
        """Every tensor of the weight files by its name there, with its file; headers only.

        Raises: SnapshotError naming the file: damaged, missing, a tensor in two files, or an index that disagrees.
        """
        found: dict[str, tuple[Path, Entry]] = {}
        for path in self.weight_files():
            for name, entry in read_entries(path).items():
                if name in found:
                    raise self._bad(f"holds {name!r}, which {found[name][0].name} holds too", path)
                found[name] = (path, entry)
        if (self.folder / INDEX).is_file():
            self._check_index(found)
        return found

    def _check_index(self, found: dict[str, tuple[Path, Entry]]) -> None:
        mapped = self._weight_map()
        wrong = [n for n, name in mapped.items() if n not in found or found[n][0] != self.folder / name]
        if wrong:
            raise self._bad(f"puts {_some(wrong)} where they are not", self.folder / INDEX)
        extra = [name for name in found if name not in mapped]
        if extra:
            raise self._bad(f"does not list {_some(extra)}, found in {found[extra[0]][0].name}", self.folder / INDEX)

    def _weight_map(self) -> dict[str, str]:
        path = self.folder / INDEX
        mapped = read_json(path).get("weight_map")
        if not isinstance(mapped, dict) or not mapped or not all(isinstance(v, str) for v in mapped.values()):
            raise self._bad("has no weight_map of names to files", path)
        for name in set(mapped.values()):
            posix, windows = PurePosixPath(name), PureWindowsPath(name)
            if (
                posix.is_absolute()
                or windows.drive
                or windows.root
                or ".." in (*posix.parts, *windows.parts)
                or not name
            ):
                raise self._bad(f"names the file {name!r}, outside the folder", path)
        return mapped

    def _bad(self, what: str, source: Path) -> SnapshotError:
        return SnapshotError(f"{source} {what}", code="bad_weights", source=source)

    def check(self, model: PreTrainedModel) -> dict[str, tuple[Path, Entry]]:
        """Compare the weight files with a model, names, shapes and dtypes; nothing is read but headers.

        Returns the files' tensors by the model's names. Raises: SnapshotError naming the first tensors that are
        missing, unexpected, of another shape, or not floating, and how many there are.
        """
        wanted = model.state_dict()
        rename = _renamer(model, wanted)
        renamed: dict[str, tuple[Path, Entry]] = {}
        for name, place in self.entries().items():
            target = rename(name)
            if target in renamed:
                raise self._bad(
                    f"holds both {name!r} and {renamed[target][1].name!r}, one tensor of the model", place[0]
                )
            renamed[target] = place
        self._refuse("lacks", [n for n in wanted if n not in renamed], "of the model's tensors", self.folder)
        self._refuse(
            "holds",
            [place[1].name for n, place in renamed.items() if n not in wanted],
            "that the model does not have",
            self._file_of(renamed, lambda n, e: n not in wanted),
        )
        self._refuse(
            "holds",
            [e.name for _, e in renamed.values() if e.dtype not in FLOATS],
            f"that are not {'/'.join(FLOATS)} (quantised weights are not supported)",
            self._file_of(renamed, lambda n, e: e.dtype not in FLOATS),
        )
        self._refuse(
            "holds",
            [
                f"{e.name} {list(e.shape)} instead of {list(wanted[n].shape)}"
                for n, (_, e) in renamed.items()
                if e.shape != tuple(wanted[n].shape)
            ],
            "of another shape than config.json says",
            self._file_of(renamed, lambda n, e: e.shape != tuple(wanted[n].shape)),
        )
        return renamed

    def _file_of(self, renamed: dict[str, tuple[Path, Entry]], fault) -> Path:  # type: ignore[no-untyped-def]
        return next((path for name, (path, entry) in renamed.items() if fault(name, entry)), self.folder)

    def _refuse(self, verb: str, names: list[str], what: str, source: Path) -> None:
        if names:
            raise self._bad(f"{verb} {len(names)} tensor(s) {what}: {_some(names)}", source)

    def fill(self, model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> None:
        """Give a meta-device model its weights, on `device` in `dtype`, one tensor at a time.

        Non-persistent buffers, which no file holds, are computed anew in float32. Parameters keep `requires_grad`.
        Raises: SnapshotError as `check`, and for weights that are not finite, in the file or once in `dtype`.
        """
        places = self.check(model)
        for path in sorted({path for path, _ in places.values()}):
            with opened(path) as file:
                for name, (where, entry) in places.items():
                    if where == path:
                        stored = file.get_tensor(entry.name)
                        tensor, finite = copied(stored, device, dtype)
                        if not finite:
                            raise self._bad(_non_finite(entry.name, stored, dtype), path)
                        _assign(model, name, tensor)
        rebuild_buffers(model, device)


def identity(folder: str | Path) -> str:
    """Which model a folder holds, as the SHA-256 (64 hexadecimal digits) of what tells models apart; well under a second.

    It covers names and bytes of the configuration, tokenizer, processor and chat template files, and of each weight file the
    name, size, header and 64 KiB at 16 fixed places spread evenly over its data. So a fine-tune differs from its base
    and a copy in another folder does not; single weights edited elsewhere in a file go unseen.
    Raises: SnapshotError as `Snapshot.open` and `Snapshot.weight_files`, and where a weight file is missing.
    """
    snapshot = Snapshot.open(folder)
    digest = hashlib.sha256()

    def take(name: str, data: bytes) -> None:
        digest.update(f"{name}\0{len(data)}\0".encode())
        digest.update(data)

    for name in _IDENTITY_FILES:
        path = snapshot.folder / name
        if path.is_file():
            take(name, path.read_bytes())
    for path in snapshot.weight_files():
        read_entries(path)  # checks the header against the file's size
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(8)
            take(f"{path.name} of {size}", head + file.read(struct.unpack("<Q", head)[0]))
            first = file.tell()
            last = max(first, size - _IDENTITY_BYTES)
            for place in range(_IDENTITY_PLACES):
                file.seek(first + (last - first) * place // (_IDENTITY_PLACES - 1))
                take("", file.read(_IDENTITY_BYTES))
    return digest.hexdigest()


def read_json(path: Path) -> dict:
    """A JSON object from a file of a snapshot. Raises: SnapshotError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SnapshotError(f"{path} is missing; is this a model folder?", code="bad_weights", source=path) from None
    except (OSError, ValueError, RecursionError) as error:
        raise SnapshotError(f"{path} cannot be read as JSON: {error}", code="bad_weights", source=path) from None
    if not isinstance(value, dict):
        raise SnapshotError(f"{path} is not a JSON object", code="bad_weights", source=path)
    return value


def rebuild_buffers(model: torch.nn.Module, device: torch.device) -> None:
    """Compute every non-persistent buffer anew, in float32 on the CPU, and move it to `device`.

    Each module that owns such buffers (rotary tables, RoTE angles) makes them in its constructor from its `config`
    alone, so a second instance of the module is the source.
    """
    for module in model.modules():
        names = [n for n in module._non_persistent_buffers_set if module._buffers.get(n) is not None]
        if names:
            with torch.device("cpu"):
                fresh = type(module)(module.config)
            for name in names:
                module._buffers[name] = getattr(fresh, name).to(device=device, dtype=torch.float32)


def _renamer(model: PreTrainedModel, wanted: dict) -> Callable[[str], str]:
    """A function from a tensor's name in a published file to its name in the library's model, by the library's rules."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    steps = get_model_conversion_mapping(model)
    renamings = [step for step in steps if isinstance(step, WeightRenaming)]
    converters = [step for step in steps if isinstance(step, WeightConverter)]

    def rename(name: str) -> str:
        if name in wanted:
            return name
        return rename_source_key(name, renamings, converters, model.base_model_prefix, wanted)[0]

    return rename


def _assign(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    if leaf in module._parameters:
        old = module._parameters[leaf]
        assert old is not None
        module._parameters[leaf] = torch.nn.Parameter(tensor, requires_grad=old.requires_grad)
    else:
        module._buffers[leaf] = tensor


def _non_finite(name: str, stored: torch.Tensor, dtype: torch.dtype) -> str:
    bad = int((~torch.isfinite(stored)).sum())
    if bad:
        return f"holds {bad} NaN or infinite value(s) in {name!r}; the file is damaged or the training run diverged"
    return f"holds values in {name!r} that {dtype} cannot hold; load with dtype=torch.float32 or torch.bfloat16"


def _some(names: Iterable[str], count: int = 3) -> str:
    names = list(names)
    rest = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + rest
