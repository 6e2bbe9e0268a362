"""What the codec's tests share: where the golden values lie, models loaded once, and a GGUF to damage."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

from audiollm import codec
from audiollm.codec.gguf_file import GgufFile

DATA = Path(__file__).parent / "data" / "codec"
GGUF = DATA / "gguf" / "tiny_v2.gguf"
TOLERANCE = 2e-6


def relative_rms(ours: np.ndarray, reference: np.ndarray) -> float:
    ours, reference = np.asarray(ours, dtype=np.float64), np.asarray(reference, dtype=np.float64)
    assert ours.shape == reference.shape
    return float(np.sqrt(np.square(ours - reference).mean() / np.square(reference).mean()))


@functools.cache
def gguf_model() -> codec.Model:
    return codec.Model.from_file(GGUF, device="cpu")


@functools.cache
def snapshot_model(name: str) -> codec.Model:
    return codec.Model.from_pretrained(DATA / name, device="cpu")


def gguf_codes(name: str) -> np.ndarray:
    return np.load(DATA / "gguf" / f"tiny_v2_codes_{name}.npy")


def gguf_audio(name: str) -> np.ndarray:
    return np.load(DATA / "gguf" / f"tiny_v2_loom_{name}.npy")


def rewrite_gguf(
    out: Path,
    *,
    metadata: dict[str, object] | None = None,
    tensors: dict[str, np.ndarray | None] | None = None,
    rename: Callable[[str], str] = str,
    kind: gguf.GGMLQuantizationType | None = None,
    aliases: tuple[list[str], list[str]] | None = None,
) -> Path:
    """The tiny GGUF with some entries and tensors changed (None drops one), renamed, or stored as another type."""
    file = GgufFile(GGUF)
    entries: dict[str, object] = {key: value.value for key, value in file.metadata.items()}
    entries.update(metadata or {})
    old_names, old_targets = (list(entries.pop(f"loom.tensor_alias.{word}")) for word in ("names", "targets"))
    names, targets = aliases or (old_names, old_targets)
    writer = gguf.GGUFWriter(None, "")
    writer.kv_data[0].clear()
    for key, value in entries.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    if names is not None and names != []:
        writer.add_array("loom.tensor_alias.names", [rename(name) for name in names])
        writer.add_array("loom.tensor_alias.targets", [rename(name) for name in targets])
    values: dict[str, np.ndarray | None] = {name: file.read(name).numpy() for name in file.tensors}
    values.update(tensors or {})
    for name, array in values.items():
        if array is None:
            continue
        if (
            kind is not None
            and array.ndim == 2
            and array.shape[1] % 32 == 0
            and "stages_" not in name.split("qkv")[0][:30]
        ):
            packed = gguf.quants.quantize(array, kind)
            writer.add_tensor(rename(name), packed, raw_dtype=kind)
        else:
            writer.add_tensor(rename(name), array)
    writer.write_header_to_file(out)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out
