"""Published snapshot folders: strict, without running anything that lies in them."""

from __future__ import annotations

import json
import shutil
import time

import numpy as np
import pytest
import torch
from codec_cases import DATA, TOLERANCE, relative_rms, snapshot_model
from safetensors.torch import load_file, save_file

from audiollm import codec
from audiollm.codec.snapshot import Snapshot, read_header
from audiollm.errors import SnapshotError

ODD = [e for e in json.loads((DATA / "odd" / "manifest.json").read_text()) if e.get("file", "").endswith("safetensors")]
CODES = np.load(DATA / "cases" / "codes_T5.npy")


@pytest.fixture
def folder(tmp_path):
    """A copy of the tiny snapshot that a test may damage."""
    return shutil.copytree(DATA / "tiny", tmp_path / "snapshot")


def edit(folder, change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def edit_config(folder, change) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def refused(folder, code="bad_weights") -> str:
    with pytest.raises(codec.ModelFileError) as error:
        codec.Model.from_pretrained(folder, device="cpu")
    assert error.value.code == code and isinstance(error.value, SnapshotError)
    assert str(folder) in error.value.source
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cut_data", "no whole safetensors file"),
        ("cut_header", "announces"),
        ("header_too_large", "announces 1099511627776 bytes"),
        ("lfs_pointer", "LFS pointer"),
        ("overlapping", "no whole safetensors file"),
        ("shape_lies", "no whole safetensors file"),
        ("duplicate_key", "a name appears twice"),
    ],
)
def test_odd_weight_files_are_refused_by_their_headers(folder, name, words):
    shutil.copy(DATA / "odd" / f"{name}.safetensors", folder / "model.safetensors")
    started = time.perf_counter()
    assert words in refused(folder)
    assert time.perf_counter() - started < 1


def test_the_manifest_is_whole(folder):
    assert len(ODD) == 8
    shutil.copy(DATA / "odd" / "ok.safetensors", folder / "model.safetensors")
    assert len(read_header(folder / "model.safetensors")) == 1  # readable, but no snapshot
    assert "is missing" in refused(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("decoder.4.input_proj.weight"), "decoder.4.input_proj.weight is missing"),
        (lambda t: t.pop("encoder.11.output_proj.weight"), "encoder.11.output_proj.weight is missing"),
        (lambda t: t.update({"decoder.4.extra": torch.ones(1)}), "decoder.4.extra does not belong"),
        (lambda t: t.update({"quantizer.input_proj.bias": torch.ones(3)}), "quantizer.input_proj.bias has shape [3]"),
        (lambda t: t["decoder.0.output_proj.weight"].fill_(float("nan")), "NaN"),
        (lambda t: t.update({"decoder.0.transformer.layers.0.linear1.weight": torch.ones(1)}), "appears twice"),
        (lambda t: t.update({"quantizer.input_proj.bias": torch.ones(16, dtype=torch.int32)}), "I32"),
    ],
    ids=["missing", "missing encoder", "extra", "shape", "nan", "twice", "type"],
)
def test_weights_that_are_not_the_configs_are_refused(folder, change, words):
    edit(folder, change)
    assert words in refused(folder, "unsupported" if words == "I32" else "bad_weights")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.update(model_type="moss"), "model_type is 'moss'"),
        (lambda c: c.update(sampling_rate=0), "sampling_rate is 0"),
        (lambda c: c.update(enable_channel_interleave=False), "enable_channel_interleave"),
        (lambda c: c.update(downsample_rate=385), "downsample_rate is 385"),
        (lambda c: c.pop("quantizer_kwargs"), "quantizer_kwargs is missing"),
        (lambda c: c["quantizer_kwargs"].update(quantizer_type="rvq"), "quantizer_type is 'rvq'"),
        (lambda c: c["decoder_kwargs"][0].update(causal=False), "causal is False"),
        (lambda c: c["decoder_kwargs"][0].update(gating="silu"), "gating is 'silu'"),
        (lambda c: c["decoder_kwargs"][0].update(num_heads=5), "5 heads"),
        (lambda c: c["decoder_kwargs"][0].update(num_layers=10**9), "num_layers"),
        (lambda c: c["decoder_kwargs"][0].update(context_duration=-1), "context_duration"),
        (lambda c: c["decoder_kwargs"][2].update(input_dimension=17), "decoder.2: input_dimension is 17"),
        (lambda c: c["decoder_kwargs"].pop(), "decoder ends 24 wide"),
        (lambda c: c["encoder_kwargs"].pop(), "encoder"),
        (lambda c: c["decoder_kwargs"][0].update(module_type="Conv"), "module_type is 'Conv'"),
        (lambda c: c.update(decoder_kwargs=None), "decoder_kwargs"),
    ],
)
def test_a_config_that_is_no_v2_is_refused_naming_the_key(folder, change, words):
    edit_config(folder, change)
    assert words in refused(folder, "unsupported")


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 100_000])
def test_a_config_that_is_no_json_object_is_refused(folder, text):
    (folder / "config.json").write_text(text)
    refused(folder)


def test_a_missing_file_is_not_found(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(codec.ModelNotFoundError) as error:
        codec.Model.from_pretrained(folder, device="cpu")
    assert error.value.code == "not_found" and "model.safetensors" in str(error.value)


def same_audio(folder) -> bool:
    ours = codec.Model.from_pretrained(folder, device="cpu").codes2speech.infer(CODES)
    return relative_rms(ours.samples, np.load(DATA / "cases" / "audio_T5.npy")) <= TOLERANCE


def test_shards_are_joined(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {name: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, name in enumerate(names)}
    for shard in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == shard}, folder / shard)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert same_audio(folder)
    for name in ("../tiny/model.safetensors", "/etc/passwd", "a/b.safetensors", "model.bin", ""):
        index.write_text(json.dumps({"weight_map": {"x": name}}))
        assert "no plain safetensors file name" in refused(folder)
    index.write_text("{}")
    assert "weight_map" in refused(folder)


def test_names_of_older_releases_are_read(folder):
    def rename(tensors):
        for name in list(tensors):
            old = name.replace("self_attn.in_proj.", "self_attn.in_projs.0.").replace("ffn.0.", "linear1.")
            old = old.replace("self_attn.out_proj.", "self_attn.out_projs.0.").replace("ffn.2.", "linear2.")
            tensors[old] = tensors.pop(name)

    edit(folder, rename)
    assert same_audio(folder)


def test_reversed_decoder_kwargs_stand_in_for_decoder_kwargs(folder):
    def turn(config):
        swap = {"input_dimension": "output_dimension", "output_dimension": "input_dimension"}
        modules = config.pop("decoder_kwargs")
        config["reversed_decoder_kwargs"] = [{swap.get(k, k): v for k, v in m.items()} for m in reversed(modules)]

    edit_config(folder, turn)
    assert same_audio(folder)


def test_a_stage_without_a_window_has_the_top_level_one(folder):
    edit_config(folder, lambda config: config["decoder_kwargs"][0].pop("context_duration"))
    assert Snapshot(folder).config.decoder[0].context == 125


def test_a_window_is_rounded_to_positions(folder):
    """0.29 s at 100 Hz is 28.999999999999996 in floats: 29 positions, not 28."""
    edit_config(folder, lambda config: config["decoder_kwargs"][6].update(context_duration=0.29))
    assert Snapshot(folder).config.decoder[3].context == 29


def test_half_precision_weights_are_read(folder):
    edit(folder, lambda tensors: tensors.update({name: t.half() for name, t in tensors.items()}))
    ours = codec.Model.from_pretrained(folder, device="cpu").codes2speech.infer(CODES)
    assert relative_rms(ours.samples, np.load(DATA / "cases" / "audio_T5.npy")) <= 1e-2


def test_the_encoder_is_read_only_when_asked_for(folder, monkeypatch):
    read: list[str] = []
    build = codec.Model.from_pretrained(folder, device="cpu")
    assert build._encoder is None
    monkeypatch.setattr(Snapshot, "encoder", lambda self, *args: read.append("encoder"))
    build.speech2codes  # noqa: B018  the door alone reads nothing
    assert read == []
    codec.Model.from_pretrained(folder, device="cpu", encoder=True)
    assert read == ["encoder"]


def test_the_encoder_is_read_once(folder):
    model = codec.Model.from_pretrained(folder, device="cpu")
    assert model.encoder is model.encoder


def test_code_in_a_folder_never_runs(folder):
    (folder / "modeling_moss_audio_tokenizer.py").write_text("raise SystemExit('ran')\n")
    (folder / "configuration_moss_audio_tokenizer.py").write_text("raise SystemExit('ran')\n")
    assert same_audio(folder)


def test_loading_leaves_the_files_free(folder):
    model = codec.Model.from_pretrained(folder, device="cpu")
    (folder / "model.safetensors").write_bytes(b"")
    ours = model.codes2speech.infer(CODES)
    assert relative_rms(ours.samples, snapshot_model("tiny").codes2speech.infer(CODES).samples) == 0
