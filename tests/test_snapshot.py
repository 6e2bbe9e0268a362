"""load_model and snapshot: what loads, what must not, and what loading leaves alone."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load, save_file
from transformers import MusicFlamingoConfig, MusicFlamingoForConditionalGeneration

from audiollm import (
    ArgumentError,
    AudioLLMError,
    Request,
    RequestError,
    Session,
    SnapshotError,
    Waveform,
    demo,
    load_model,
)
from audiollm.families.music_flamingo import MusicFlamingo
from audiollm.snapshot import INDEX, SINGLE, Snapshot
from audiollm.weights import Entry

DATA = Path(__file__).parent / "data" / "music_flamingo"
CPU = {"device": "cpu", "dtype": torch.float32}
NORM = "language_model.model.norm.weight"  # the name in the file; the library's is NORM_INSIDE
NORM_INSIDE = "model.language_model.norm.weight"
CONV = "audio_tower.conv1.weight"


def load_file(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file that may be written to afterwards: nothing stays mapped."""
    return load(path.read_bytes())


def refused(folder: object, **how: object) -> SnapshotError:
    with pytest.raises(SnapshotError) as caught:
        load_model(folder, **{**CPU, **how})
    return caught.value


def bad_weights(folder: Path, *says: str, source: Path | None = None, **how: object) -> None:
    error = refused(folder, **how)
    assert error.code == "bad_weights"
    for word in says:
        assert word in str(error)
    assert error.source == str(source or folder / SINGLE)
    assert error.source in str(error)


def edit_weights(folder: Path, change: Callable[[dict], object]) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)


def edit_json(path: Path, change: Callable[[dict], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def shard(
    folder: Path, names: tuple[str, ...] = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
) -> dict:
    """Turn a single-file snapshot into one of several shards with an index; gives back the weight map."""
    tensors = load_file(folder / SINGLE)
    weight_map = {name: names[k % len(names)] for k, name in enumerate(sorted(tensors))}
    for file in names:
        (folder / file).parent.mkdir(exist_ok=True)
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, folder / file)
    (folder / SINGLE).unlink()
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def is_equal(a: Session, b: Session) -> bool:
    mine, other = a.model.state_dict(), b.model.state_dict()
    return mine.keys() == other.keys() and all(torch.equal(mine[n], other[n]) for n in mine)


@pytest.fixture(scope="session")
def built_on_cpu(tiny_mf: Path) -> MusicFlamingoForConditionalGeneration:
    """The library's own model from the same config.json, with random weights."""
    with torch.random.fork_rng():
        return MusicFlamingoForConditionalGeneration(MusicFlamingoConfig.from_dict(Snapshot.open(tiny_mf).config))


# What loads.


def test_weights_are_those_of_the_file(session_mf: Session, tiny_mf: Path) -> None:
    stored, loaded = load_file(tiny_mf / SINGLE), session_mf.model.state_dict()
    assert len(stored) == len(loaded)
    assert torch.equal(loaded[NORM_INSIDE], stored[NORM])
    assert sorted(float(t.double().sum()) for t in stored.values()) == sorted(
        float(t.double().sum()) for t in loaded.values()
    )


def test_the_public_attributes(session_mf: Session) -> None:
    assert session_mf.family == "music_flamingo"
    assert isinstance(session_mf.model, MusicFlamingoForConditionalGeneration)
    assert session_mf.processor.tokenizer is not None
    assert session_mf.context == 32_768
    assert not any(module.training for module in session_mf.model.modules())


@pytest.mark.parametrize("kind", [str, Path])
def test_a_folder_as_str_and_as_path_with_a_tilde(kind: type, mf_copy: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(mf_copy.parent))
    assert load_model(kind("~/snapshot"), **CPU).family == "music_flamingo"


@pytest.mark.parametrize(
    "names", [("a.safetensors",), ("a.safetensors", "b.safetensors"), ("sub/a.safetensors", "c.safetensors")]
)
def test_shards_load_equal(names: tuple, mf_copy: Path, session_mf: Session) -> None:
    shard(mf_copy, names)
    assert is_equal(load_model(mf_copy, **CPU), session_mf)


def test_the_librarys_own_names_load_equal(mf_copy: Path, session_mf: Session) -> None:
    save_file({n: t.clone() for n, t in session_mf.model.state_dict().items()}, mf_copy / SINGLE)
    assert is_equal(load_model(mf_copy, **CPU), session_mf)


def test_what_the_library_saves_loads_equal(mf_copy: Path, session_mf: Session) -> None:
    (mf_copy / SINGLE).unlink()
    session_mf.model.save_pretrained(mf_copy, max_shard_size="200KB")
    assert (mf_copy / INDEX).is_file()
    assert is_equal(load_model(mf_copy, **CPU), session_mf)


def test_links_of_a_hub_cache_are_followed(tiny_mf: Path, tmp_path: Path, session_mf: Session) -> None:
    staged = Path(shutil.copytree(tiny_mf, tmp_path / "staged"))
    shard(staged)
    blobs, snapshot = tmp_path / "models--x--y" / "blobs", tmp_path / "models--x--y" / "snapshots" / "0f3a"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for k, file in enumerate(sorted(staged.iterdir())):
        file.rename(blobs / f"blob{k}")
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", f"blob{k}"))
    assert is_equal(load_model(snapshot, **CPU), session_mf)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_are_converted_and_buffers_stay_float32(dtype, tiny_mf, session_mf, built_on_cpu) -> None:
    session = load_model(tiny_mf, device="cpu", dtype=dtype)
    assert session.dtype == dtype
    for name, tensor in session.model.state_dict().items():
        assert torch.equal(tensor, session_mf.model.state_dict()[name].to(dtype))
    check_buffers(session, built_on_cpu)


def test_buffers_equal_those_of_a_model_built_on_the_cpu(session_mf: Session, built_on_cpu) -> None:
    check_buffers(session_mf, built_on_cpu)


def check_buffers(session: Session, built: torch.nn.Module) -> None:
    mine, wanted = dict(session.model.named_buffers()), dict(built.named_buffers())
    published = json.loads((DATA / "real_state_dict_keys.json").read_text())["non_persistent_buffers"]
    assert mine.keys() == wanted.keys() == published.keys()
    for name in wanted:
        assert mine[name].dtype == wanted[name].dtype == torch.float32
        assert torch.equal(mine[name], wanted[name]), name


def test_requires_grad_is_kept(session_mf: Session, built_on_cpu) -> None:
    wanted = {name: p.requires_grad for name, p in built_on_cpu.named_parameters()}
    assert {name: p.requires_grad for name, p in session_mf.model.named_parameters()} == wanted
    assert len(set(wanted.values())) == 2  # the library freezes the tower's positions


def test_nothing_global_is_changed(tiny_mf: Path) -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    before, numpys = torch.get_rng_state(), np.random.get_state()[1].copy()
    load_model(tiny_mf, device="cpu", dtype=torch.bfloat16)
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numpys)
    assert torch.get_default_dtype() == torch.float32
    assert torch.get_default_device() == torch.device("cpu")
    assert torch.is_grad_enabled()


def test_a_default_dtype_of_the_callers_changes_nothing(tiny_mf: Path, session_mf: Session, built_on_cpu) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        session = load_model(tiny_mf, **CPU)
    finally:
        torch.set_default_dtype(torch.float32)
    assert is_equal(session, session_mf)
    check_buffers(session, built_on_cpu)


def test_the_snapshot_is_neither_written_to_nor_kept_mapped(mf_copy: Path, session_mf: Session) -> None:
    session, before = load_model(mf_copy, **CPU), (mf_copy / SINGLE).read_bytes()
    with (mf_copy / SINGLE).open("r+b") as file:
        file.write(bytes(len(before)))
    assert is_equal(session, session_mf)
    with torch.no_grad():
        session.model.state_dict()[NORM_INSIDE].add_(1)
    assert (mf_copy / SINGLE).read_bytes() == bytes(len(before))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_attention_asked_for_is_used(attention: str, tiny_mf: Path) -> None:
    config = load_model(tiny_mf, **CPU, attention=attention).model.config
    assert config._attn_implementation == attention
    assert config.text_config._attn_implementation == config.audio_config._attn_implementation == attention


def test_auto_map_runs_no_code(mf_copy: Path, session_mf: Session) -> None:
    trace = mf_copy / "it_ran"
    (mf_copy / "evil.py").write_text(f"open({str(trace)!r}, 'w')\nclass Evil: pass\n")
    for name in ("config.json", "processor_config.json", "tokenizer_config.json"):
        kinds = ("AutoConfig", "AutoModelForCausalLM", "AutoProcessor", "AutoTokenizer", "AutoFeatureExtractor")
        auto = dict.fromkeys(kinds, "evil.Evil")
        if name == "tokenizer_config.json":
            auto["AutoTokenizer"] = ["evil.Evil", "evil.Evil"]
        edit_json(mf_copy / name, lambda value, auto=auto: value.update(auto_map=auto))
    assert is_equal(load_model(mf_copy, **CPU), session_mf)
    assert not trace.exists()
    assert "evil" not in sys.modules


def test_a_copied_folder_loads_with_an_empty_home_and_no_network(mf_copy: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    code = """
import socket, sys
def refuse(*args, **kwargs):
    raise AssertionError("the network was asked for")
socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse
import numpy, torch
from audiollm import Request, Waveform, load_model
session = load_model(sys.argv[1], device="cpu", dtype=torch.float32)
batch = session.prepare([Request("What is this?", [Waveform(numpy.zeros(4000), 16000)])])
assert len(batch.slots[0].token_positions) == 6
"""
    dropped = ("HF_", "TRANSFORMERS_", "HUGGINGFACE_", "XDG_", "TORCH_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(dropped)} | {"HOME": str(home)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", code, mf_copy],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr


def test_other_caps_and_contexts_come_from_the_snapshot(mf_copy: Path) -> None:
    edit_json(mf_copy / "processor_config.json", lambda c: c.update(max_audio_len=2))
    edit_json(mf_copy / "config.json", lambda c: c["text_config"].update(max_position_embeddings=160))
    session = load_model(mf_copy, **CPU)
    assert session.context == 160
    clip = Waveform(np.zeros(48_000), 16_000)
    with pytest.warns(UserWarning, match="first 2 s"):
        slot = session.prepare([Request("", [clip])]).slots[0]
    assert (slot.used_s, slot.duration_s, len(slot.token_positions)) == (2.0, 3.0, 50)
    with pytest.raises(RequestError, match="context holds 160"):
        session.prepare([Request("and so on " * 20, [clip])])


def test_a_longer_cap_is_taken_too(mf_copy: Path) -> None:
    edit_json(mf_copy / "processor_config.json", lambda c: c.update(max_audio_len=1_800))
    edit_json(mf_copy / "config.json", lambda c: c["text_config"].update(max_position_embeddings=131_072))
    session = load_model(mf_copy, **CPU)
    assert (session.processor.max_audio_len, session._adapter.max_s, session.context) == (1_800, 1_800, 131_072)


def test_the_full_size_model_has_the_published_names_and_shapes() -> None:
    published = json.loads((DATA / "real_state_dict_keys.json").read_text())
    config = json.loads((DATA / "real_config.json").read_text())
    with torch.device("meta"):
        model = MusicFlamingo.build(config, "sdpa")
    wanted = {name: tuple(fields["shape"]) for name, fields in published["tensors"].items()}
    assert {name: tuple(t.shape) for name, t in model.state_dict().items()} == wanted
    assert sum(p.numel() for p in model.parameters()) == published["total_params"]

    class Published(Snapshot):
        def entries(self) -> dict:
            stored = {f["checkpoint_key"]: tuple(f["shape"]) for f in published["tensors"].values()}
            return {name: (Path(SINGLE), Entry(name, "BF16", shape)) for name, shape in stored.items()}

    places = Published(Path("."), config).check(model)
    assert {name: entry.name for name, (_, entry) in places.items()} == {
        name: fields["checkpoint_key"] for name, fields in published["tensors"].items()
    }


# Weight files that must not load.


def test_missing_tensors_are_counted_and_named(mf_copy: Path) -> None:
    edit_weights(mf_copy, lambda t: [t.pop(name) for name in (NORM, CONV)])
    bad_weights(mf_copy, "lacks 2 tensor(s)", NORM_INSIDE, "audio_tower.conv1.weight", source=mf_copy)


def test_unexpected_tensors_are_counted_and_named(mf_copy: Path) -> None:
    edit_weights(mf_copy, lambda t: t.update({f"extra.{k}": torch.zeros(1) for k in range(5)}))
    bad_weights(mf_copy, "holds 5 tensor(s) that the model does not have", "extra.0", "extra.2", "and 2 more")


def test_wrong_shapes_are_named_with_both(mf_copy: Path) -> None:
    edit_weights(mf_copy, lambda t: t.update({NORM: torch.zeros(49)}))
    bad_weights(mf_copy, "1 tensor(s) of another shape", f"{NORM} [49] instead of [48]")


def test_a_transposed_tensor_is_of_another_shape(mf_copy: Path) -> None:
    name = "language_model.model.layers.0.mlp.up_proj.weight"
    edit_weights(mf_copy, lambda t: t.update({name: t[name].T.contiguous()}))
    bad_weights(mf_copy, "another shape", name)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_tensors_that_are_not_floating_are_named(dtype: torch.dtype, mf_copy: Path) -> None:
    edit_weights(mf_copy, lambda t: t.update({NORM: t[NORM].to(dtype)}))
    bad_weights(mf_copy, "1 tensor(s) that are not", NORM, "quantised")


def test_two_names_of_one_tensor_are_refused(mf_copy: Path) -> None:
    edit_weights(mf_copy, lambda t: t.update({NORM_INSIDE: t[NORM].clone()}))
    bad_weights(mf_copy, NORM, NORM_INSIDE, "one tensor of the model")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, -1])
def test_non_finite_weights_are_named(value: float, at: int, mf_copy: Path) -> None:
    edit_weights(mf_copy, lambda t: t[CONV].view(-1).__setitem__(at, value))
    bad_weights(mf_copy, "1 NaN or infinite value(s)", CONV)


def test_infinities_that_cancel_are_found(mf_copy: Path) -> None:
    edit_weights(mf_copy, lambda t: t[CONV].view(-1)[:2].copy_(torch.tensor([np.inf, -np.inf])))
    bad_weights(mf_copy, "2 NaN or infinite value(s)", CONV)


def test_finite_weights_whose_sum_overflows_load(mf_copy: Path) -> None:
    edit_weights(mf_copy, lambda t: t[CONV].fill_(3e38))
    assert load_model(mf_copy, **CPU).model.model.audio_tower.conv1.weight.max().item() == pytest.approx(3e38)


def test_weights_that_float16_cannot_hold_are_refused_with_the_cure(mf_copy: Path) -> None:
    edit_weights(mf_copy, lambda t: t[CONV].view(-1).__setitem__(-1, 1e5))
    bad_weights(mf_copy, CONV, "torch.float16 cannot hold", "dtype=torch.float32", dtype=torch.float16)
    assert load_model(mf_copy, **CPU).dtype == torch.float32


@pytest.mark.parametrize("keep", [0, 7, 8, 500, -1, -100_000])
def test_a_cut_file_is_refused(keep: int, mf_copy: Path) -> None:
    data = (mf_copy / SINGLE).read_bytes()
    (mf_copy / SINGLE).write_bytes(data[:keep])
    bad_weights(mf_copy)


def test_bytes_after_the_end_are_refused(mf_copy: Path) -> None:
    (mf_copy / SINGLE).write_bytes((mf_copy / SINGLE).read_bytes() + b"\0")
    bad_weights(mf_copy, "bytes that belong to no tensor")


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"nonsense",
        b"\xff\xfe{}",
        b"[" * 200_000,
        b'{"a":1}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0]}}',
        b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F4","shape":[1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":["F32"],"shape":[1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":{},"shape":[1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
        b'{"a":{"dtype":"F32","shape":[18446744073709551616,0],"data_offsets":[4,4]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    ],
    ids=lambda header: header[:44].decode("latin-1"),
)
def test_a_header_that_is_no_safetensors_is_refused(header: bytes, mf_copy: Path) -> None:
    (mf_copy / SINGLE).write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    bad_weights(mf_copy)


def test_a_pickle_under_the_name_is_refused(mf_copy: Path) -> None:
    torch.save(load_file(mf_copy / SINGLE), mf_copy / SINGLE)
    bad_weights(mf_copy)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "last.ckpt"])
def test_a_folder_of_pickles_is_refused_and_says_so(name: str, mf_copy: Path) -> None:
    (mf_copy / SINGLE).rename(mf_copy / name)
    bad_weights(mf_copy, name, "pickle", source=mf_copy)


def test_a_folder_without_weights_is_refused(mf_copy: Path) -> None:
    (mf_copy / SINGLE).unlink()
    bad_weights(mf_copy, SINGLE, INDEX, source=mf_copy)


def test_an_index_beside_a_single_file_is_refused(mf_copy: Path) -> None:
    kept = (mf_copy / SINGLE).read_bytes()
    shard(mf_copy)
    (mf_copy / SINGLE).write_bytes(kept)
    bad_weights(mf_copy, INDEX, "both", source=mf_copy)


def test_a_missing_shard_is_named(mf_copy: Path) -> None:
    shard(mf_copy)
    gone = mf_copy / "model-00002-of-00002.safetensors"
    gone.unlink()
    error = refused(mf_copy)
    assert error.code == "not_found"
    assert error.source == str(gone)
    assert str(gone) in str(error)


def test_a_dangling_link_to_weights_is_named(mf_copy: Path) -> None:
    (mf_copy / SINGLE).unlink()
    (mf_copy / SINGLE).symlink_to("nowhere")
    assert refused(mf_copy).source == str(mf_copy / SINGLE)


@pytest.mark.parametrize(
    "name", ["../out.safetensors", "sub/../../out.safetensors", "/out.safetensors", r"..\out.safetensors",
             r"C:\out.safetensors", "C:out.safetensors", r"\\server\share\out.safetensors", r"\out.safetensors", ""],
)  # fmt: skip
def test_an_index_that_leaves_the_folder_is_refused(name: str, mf_copy: Path) -> None:
    weight_map = shard(mf_copy, ("out.safetensors",))
    (mf_copy / "out.safetensors").rename(mf_copy.parent / "out.safetensors")
    write_index(mf_copy, dict.fromkeys(weight_map, name))
    bad_weights(mf_copy, "outside the folder", source=mf_copy / INDEX)


@pytest.mark.parametrize("weight_map", [{}, [], None, {NORM: 3}, "model.safetensors"])
def test_an_index_without_a_map_is_refused(weight_map: object, mf_copy: Path) -> None:
    shard(mf_copy)
    write_index(mf_copy, weight_map)
    bad_weights(mf_copy, "weight_map", source=mf_copy / INDEX)


def test_an_index_that_is_no_json_is_refused(mf_copy: Path) -> None:
    shard(mf_copy)
    (mf_copy / INDEX).write_text("{")
    bad_weights(mf_copy, "JSON", source=mf_copy / INDEX)


def test_an_index_that_disagrees_with_the_files_is_refused(mf_copy: Path) -> None:
    weight_map = shard(mf_copy)
    files = sorted(set(weight_map.values()))
    write_index(mf_copy, {**weight_map, NORM: next(f for f in files if f != weight_map[NORM])})
    bad_weights(mf_copy, NORM, "where they are not", source=mf_copy / INDEX)
    write_index(mf_copy, {**weight_map, "extra.weight": files[0]})
    bad_weights(mf_copy, "extra.weight", source=mf_copy / INDEX)
    write_index(mf_copy, {n: f for n, f in weight_map.items() if n != NORM})
    bad_weights(mf_copy, "does not list", NORM, source=mf_copy / INDEX)


def test_a_tensor_in_two_shards_is_refused(mf_copy: Path) -> None:
    weight_map = shard(mf_copy)
    other = mf_copy / next(f for f in sorted(weight_map.values()) if f != weight_map[NORM])
    save_file({**load_file(other), NORM: torch.zeros(48)}, other)
    error = refused(mf_copy)
    assert error.code == "bad_weights"
    assert NORM in str(error)
    assert weight_map[NORM] in str(error)
    assert other.name in str(error)


def test_names_are_judged_before_a_tensor_is_read(mf_copy: Path, monkeypatch) -> None:
    edit_weights(mf_copy, lambda t: t.pop(NORM))
    monkeypatch.setattr("audiollm.snapshot.opened", lambda path: pytest.fail("a weight file was opened"))
    refused(mf_copy)


# Folders and configurations that must not load.


def test_a_hub_name_is_not_looked_up() -> None:
    error = refused("nvidia/music-flamingo-2601-hf")
    assert error.code == "not_found"
    assert "hf download" in str(error)


def test_a_file_is_no_folder(tiny_mf: Path) -> None:
    assert refused(tiny_mf / "config.json").code == "not_found"


@pytest.mark.parametrize("folder", ["~nobody-of-this-name/model", "a\0b", "m" * 300], ids=["tilde", "nul", "long"])
def test_an_impossible_folder_is_not_found(folder: str) -> None:
    assert refused(folder).code == "not_found"


@pytest.mark.parametrize("folder", [None, 3, b"model"])
def test_a_folder_that_is_no_path_is_refused_by_us(folder: object) -> None:
    with pytest.raises(AudioLLMError):
        load_model(folder, **CPU)


@pytest.mark.parametrize("text", ["", "{", "[]", "\ufeff{}", "null", '{"model_type": 3}', "{}"])
def test_a_config_that_is_no_config_is_refused(text: str, mf_copy: Path) -> None:
    (mf_copy / "config.json").write_text(text)
    bad_weights(mf_copy, source=mf_copy / "config.json")


def test_a_missing_config_is_named(mf_copy: Path) -> None:
    (mf_copy / "config.json").unlink()
    bad_weights(mf_copy, "missing", source=mf_copy / "config.json")


def test_an_unknown_model_type_names_the_known_ones(mf_copy: Path) -> None:
    edit_json(mf_copy / "config.json", lambda c: c.update(model_type="llama"))
    error = refused(mf_copy)
    assert error.code == "unsupported"
    assert "'llama'" in str(error)
    assert "musicflamingo" in str(error)
    assert error.source == str(mf_copy / "config.json")


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["text_config"].update(hidden_size="48"),
        lambda c: c["text_config"].update(num_attention_heads=0),
        lambda c: c["text_config"].update(hidden_act="nope"),
        lambda c: c["text_config"].update(layer_types=["nope"]),
        lambda c: c["audio_config"].update(hidden_size=-1),
        lambda c: c["audio_config"].update(model_type="nope"),
        lambda c: c.update(text_config="x"),
    ],
    ids=["width", "heads", "activation", "layer_types", "negative", "tower", "text"],
)
def test_a_config_that_makes_no_model_is_refused_by_us(change: Callable, mf_copy: Path) -> None:
    edit_json(mf_copy / "config.json", change)
    error = refused(mf_copy)
    assert error.code == "bad_weights"
    assert error.source == str(mf_copy / "config.json")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "processor_config.json"])
@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_processor_file_is_refused_by_us(name: str, text: str, mf_copy: Path) -> None:
    (mf_copy / name).write_text(text)
    assert refused(mf_copy).code == "bad_weights"


def test_a_missing_processor_file_is_refused_by_us(mf_copy: Path) -> None:
    (mf_copy / "processor_config.json").unlink()
    assert refused(mf_copy).code == "bad_weights"


@pytest.mark.parametrize("template", ["{% if", "no turn at all", None, "{{ messages[0].content | upper }}"])
def test_a_chat_template_that_cannot_be_used_is_refused_by_us(template: str | None, mf_copy: Path) -> None:
    (mf_copy / "chat_template.jinja").unlink()
    if template is not None:
        (mf_copy / "chat_template.jinja").write_text(template)
    with pytest.raises(SnapshotError) as caught:
        load_model(mf_copy, **CPU).prepare([Request("hello")])
    assert caught.value.code == "bad_weights"


def test_a_cap_that_is_no_number_is_refused_by_us(mf_copy: Path) -> None:
    edit_json(mf_copy / "processor_config.json", lambda c: c.update(max_audio_len="long"))
    assert refused(mf_copy).code == "bad_weights"


def test_a_tokenizer_of_another_model_is_refused(mf_copy: Path) -> None:
    edit_json(mf_copy / "config.json", lambda c: c.update(audio_token_id=100))
    assert "audio_token_id 100" in str(refused(mf_copy))


# Arguments.


@pytest.mark.parametrize(
    "device", ["auto", "meta", torch.device("meta"), {"": "cpu"}, None, 0, "toaster", "cpu:x"], ids=str
)
def test_other_devices_are_refused_by_name_with_the_cure(device: object, tiny_mf: Path) -> None:
    with pytest.raises(ArgumentError, match="cuda:0") as caught:
        load_model(tiny_mf, device=device, dtype=torch.float32)
    assert repr(device) in str(caught.value)
    assert 'device="cpu", dtype=torch.float32' in str(caught.value)
    assert (caught.value.code, caught.value.source) == ("bad_device", "device")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_asked_for_and_absent_says_so(tiny_mf: Path) -> None:
    with pytest.raises(ArgumentError, match=r'cuda:0.*CUDA.*device="cpu", dtype=torch.float32') as caught:
        load_model(tiny_mf)
    assert caught.value.code == "bad_device"


@pytest.mark.parametrize("dtype", ["float32", None, np.float32, torch.int8, torch.float8_e4m3fn], ids=str)
def test_other_dtypes_are_refused(dtype: object, tiny_mf: Path) -> None:
    with pytest.raises(ArgumentError, match=r"torch\.bfloat16, torch\.float32") as caught:
        load_model(tiny_mf, device="cpu", dtype=dtype)
    assert caught.value.source == "dtype"


@pytest.mark.parametrize("attention", ["flex_attention", "SDPA", None, ["sdpa"]], ids=str)
def test_other_attentions_are_refused(attention: object, tiny_mf: Path) -> None:
    with pytest.raises(ArgumentError, match="'sdpa', 'eager', 'flash_attention_2'") as caught:
        load_model(tiny_mf, **CPU, attention=attention)
    assert caught.value.source == "attention"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("installed", [False, True])
def test_flash_attention_on_the_cpu_is_refused_at_once(installed, dtype, tiny_mf: Path, monkeypatch) -> None:
    find = importlib.util.find_spec
    flash = importlib.util.spec_from_loader("flash_attn", None) if installed else None
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *how: flash if name == "flash_attn" else find(name, *how)
    )
    with pytest.raises(ArgumentError, match=r'flash_attention_2.*attention="sdpa"'):
        load_model(tiny_mf, device="cpu", dtype=dtype, attention="flash_attention_2")


@pytest.mark.parametrize("version", ["5.15.9", "5.25.0", "4.57.1"])
def test_a_transformers_outside_the_range_is_refused_with_the_cure(version: str, tiny_mf: Path, monkeypatch) -> None:
    ask = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == "transformers" else ask(name))
    with pytest.raises(ArgumentError, match=rf"transformers {version}.*pip install 'transformers.*5\.16") as caught:
        load_model(tiny_mf, **CPU)
    assert caught.value.code == "bad_version"


def test_the_range_is_the_one_of_the_package() -> None:
    import tomllib

    from packaging.requirements import Requirement

    from audiollm.loading import TRANSFORMERS

    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    (wanted,) = [r for r in map(Requirement, project["dependencies"]) if r.name == "transformers"]
    assert wanted.specifier == TRANSFORMERS


def test_arguments_are_judged_before_the_folder_is_read(monkeypatch, tiny_mf: Path) -> None:
    monkeypatch.setattr(Snapshot, "open", lambda *args: pytest.fail("the folder was read"))
    for how in ({"device": "auto"}, {"dtype": "x", "device": "cpu"}, {"attention": "x", "device": "cpu"}):
        with pytest.raises(ArgumentError):
            load_model(tiny_mf, **how)


# What a processor's files must not bring about.


@pytest.mark.parametrize("where", ["key", "file"])
def test_an_audio_tokenizer_is_refused_before_it_is_fetched_or_unpickled(where: str, mf_copy: Path) -> None:
    asked = {"audio_tokenizer_class": "DacModel", "audio_tokenizer_name_or_path": "someone/model"}
    if where == "key":
        edit_json(mf_copy / "processor_config.json", lambda c: c.update(audio_tokenizer=asked))
    else:
        (mf_copy / "audio_tokenizer_config.json").write_text(json.dumps(asked))
    assert "audio tokenizer" in str(refused(mf_copy))


@pytest.mark.parametrize(
    "change",
    [{"chunk_length": 0}, {"hop_length": 320}, {"padding_side": "left"}, {"dither": 0.1}, {"feature_size": 80}],
    ids=str,
)
def test_another_feature_extractor_is_refused(change: dict, mf_copy: Path) -> None:
    edit_json(mf_copy / "processor_config.json", lambda c: c["feature_extractor"].update(change))
    assert "feature extractor" in str(refused(mf_copy))


def test_a_tokenizer_that_lacks_the_turn_marks_is_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(demo.snapshot("moss_music"), tmp_path / "moss"))
    edit_json(folder / "tokenizer_config.json", lambda c: c.update(added_tokens_decoder={}))
    (folder / "added_tokens.json").unlink()
    assert "<|im_start|>" in str(refused(folder))


@pytest.mark.parametrize("token", [-1, 10**9])
def test_audio_ids_past_the_embedding_are_refused(token: int, tiny_moss: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_moss, tmp_path / "moss"))
    edit_json(folder / "preprocessor_config.json", lambda c: c.update(audio_start_id=token))
    assert f"audio start has the id {token}" in str(refused(folder))


def test_many_repeated_names_in_a_header_are_refused_at_once(mf_copy: Path) -> None:
    names = ",".join(f'"t{k}":0' for k in range(60_000)) + ',"t59999":0'
    text = ("{" + names + "}").encode()
    (mf_copy / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text)
    bad_weights(mf_copy, "stands there twice")


@pytest.mark.parametrize("fault", ["id", "cap", "template"])
def test_faults_of_the_processor_are_told_before_a_weight_is_read(fault: str, mf_copy: Path, monkeypatch) -> None:
    if fault == "id":
        edit_json(mf_copy / "config.json", lambda c: c.update(audio_token_id=100))
    elif fault == "cap":
        edit_json(mf_copy / "processor_config.json", lambda c: c.update(max_audio_len="long"))
    else:
        (mf_copy / "chat_template.jinja").write_text("{{ 1 / 0 }}")
    monkeypatch.setattr("audiollm.snapshot.copied", lambda *args: pytest.fail("a weight was read"))
    refused(mf_copy)
