"""Observations on disk: a safetensors file with values and rows, and a JSON beside it that says what they are.

The JSON holds the model's identity, the requests, the timeline and the versions, and the SHA-256 of the tensors, so
that what is loaded is known to be what was saved, and from which model.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import warnings
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from . import __version__
from .errors import ArgumentError, SnapshotError
from .observe import Activation, Observation
from .request import Waveform
from .rows import Rows
from .snapshot import identity

if TYPE_CHECKING:
    from .session import Session

FORMAT = 1


def save_observation(observation: Observation, path: str | Path) -> Path:
    """Write an observation's last call to `path`, which ends in .safetensors, and `path` with .json; returns the path.

    Raises: ArgumentError for another ending, nothing seen, or a call whose batch was not known.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ArgumentError(f"{path} must end in .safetensors", code="bad_argument", source=path)
    if not len(observation) or not observation.context:
        raise ArgumentError(
            "there is nothing to save: no call was seen, or it was a direct one whose batch= was not given",
            code="bad_argument",
            source="observation",
        )
    if not path.parent.is_dir() or path.is_dir():
        raise ArgumentError(f"{path.parent} is no folder, or {path} is one", code="bad_argument", source=path)
    tensors = {}
    for name, seen in observation.items():
        tensors[f"values/{name}"] = seen.values.detach().cpu().contiguous().clone()
        if seen.rows is not None:
            for field in fields(Rows):
                tensors[f"rows/{name}/{field.name}"] = torch.from_numpy(getattr(seen.rows, field.name).copy())
    unfinished = path.with_name(f".{path.name}")
    save_file(tensors, unfinished)
    said = _said(observation.context) | {"points": list(observation), "sha256": _sha256(unfinished)}
    unfinished.replace(path)
    _beside(path).write_text(json.dumps(said, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def load_observation(path: str | Path, session: Session | None = None) -> Observation:
    """An observation as it was saved; its `context` is the JSON. Warns where it was made with other versions than these.

    Raises: ArgumentError where a file is missing, changed since, or of another format; SnapshotError where `session` is
    given and holds another model than the one observed.
    """
    path = Path(path)
    try:
        said = json.loads(_beside(path).read_text(encoding="utf-8"))
        right = isinstance(said, dict) and said.get("format") == FORMAT and said["sha256"] == _sha256(path)
        tensors = load_file(path) if right else {}
        call = {name: _activation(name, tensors) for name in said["points"]} if right else {}
        model, made_with = (dict(said["model"]), dict(said["versions"])) if right else ({}, {})
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ArgumentError(
            f"{path} and {_beside(path).name} cannot be read as an observation: {error}",
            code="bad_argument",
            source=path,
        ) from None
    if not right:
        raise ArgumentError(
            f"{path} is not the file that {_beside(path).name} describes, or of another format; save it again",
            code="bad_argument",
            source=path,
        )
    if session is not None and (model.get("identity") is None or session.identity != model["identity"]):
        raise SnapshotError(
            f"{path} was observed in another model ({model.get('session')}), or in one without a snapshot folder, which cannot "
            "be compared; load that snapshot, or pass no session",
            code="bad_weights",
            source=path,
        )
    versions = _versions()
    others = [f"{name} {found}" for name, found in made_with.items() if versions.get(name) != found]
    if others:
        warnings.warn(f"{path} was made with {', '.join(others)}; values may differ in the last digits", stacklevel=2)
    return Observation([call], said)


def _activation(name: str, tensors: dict[str, torch.Tensor]) -> Activation:
    known = f"rows/{name}/position" in tensors
    rows = Rows(*(tensors[f"rows/{name}/{f.name}"].numpy() for f in fields(Rows))) if known else None
    return Activation(name, tensors[f"values/{name}"], rows)


def _said(context: dict[str, Any]) -> dict[str, Any]:
    """The JSON of an observation; one that was loaded keeps its own."""
    if "sha256" in context:
        return dict(context)
    folder = context["folder"]
    model = {"identity": None if folder is None else identity(folder)}
    return {
        "format": FORMAT,
        "model": model | {name: context[name] for name in ("family", "session")},
        "versions": _versions(),
        "requests": [_request(request) for request in context["requests"]],
        "timeline": [_timeline(t) for t in context["timeline"]],
        "prompt_width": context["prompt_width"],
    }


def _versions() -> dict[str, str]:
    return {"audiollm": __version__} | {name: importlib.metadata.version(name) for name in ("torch", "transformers")}


def _beside(path: Path) -> Path:
    return path.with_suffix(".json")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _request(request: Any) -> dict:
    return {"prompt": request.prompt, "audios": [_audio(audio) for audio in request.audios]}


def _audio(audio: Any) -> dict:
    if isinstance(audio, Waveform):
        digest = hashlib.sha256(audio.samples.tobytes()).hexdigest()
        return {"samples": len(audio.samples), "sample_rate": audio.sample_rate, "sha256": digest}
    return {"path": str(audio)}


def _timeline(source: Any) -> dict:
    return {
        "request": source.sample_index,
        "audio": source.audio_index,
        "name": source.name,
        "used_s": source.used_s,
        "token_s": source.clock.token_s,
        "sample_rate": source.clock.sample_rate,
        "n_samples": source.n_samples,
        "positions": source.positions.tolist(),
    }
