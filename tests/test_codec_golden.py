"""The codec against the published code and the loom engine: exact, whatever the chunking."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from audiollm.vendor.moss_audio_tokenizer import decoder_shapes, dequantize, encoder_shapes, parse_config
from codec_cases import DATA, GGUF, TOLERANCE, gguf_audio, gguf_codes, gguf_model, relative_rms, snapshot_model

from audiollm import codec
from audiollm.codec.decoding import encode

CASES = [
    ("tiny", "cases", "T1"),
    ("tiny", "cases", "T5"),
    ("tiny", "cases", "T200"),
    ("tiny_48k", "cases_48k", "T1"),
    ("tiny_48k", "cases_48k", "T5"),
    ("tiny_48k", "cases_48k", "T37"),
]


def load(folder: str, name: str) -> np.ndarray:
    return np.load(DATA / folder / f"{name}.npy")


@pytest.mark.parametrize(("snapshot", "folder", "name"), CASES)
def test_a_snapshot_decodes_as_the_published_code(snapshot, folder, name):
    audio = snapshot_model(snapshot).codes2speech.infer(load(folder, f"codes_{name}"))
    assert relative_rms(audio.samples, load(folder, f"audio_{name}")) <= TOLERANCE


@pytest.mark.parametrize(
    ("snapshot", "folder", "name"),
    [("tiny", "cases", "T1"), ("tiny", "cases", "T5"), ("tiny_48k", "cases_48k", "T5")],
)
def test_a_prefix_of_12_decodes_as_the_published_code(snapshot, folder, name):
    model, codes = snapshot_model(snapshot), load(folder, f"codes_{name}")
    golden = load(folder, f"audio_{name}_prefix12")
    absent = codes.copy()
    absent[:, 12:] = 1024
    for audio in (
        model.codes2speech.infer(codes, num_codebooks=12),
        model.codes2speech.infer(codes[:, :12]),
        model.codes2speech.infer(absent),
    ):
        assert relative_rms(audio.samples, golden) <= TOLERANCE


@pytest.mark.parametrize("chunk", [1, 7, 64, 100, 200])
@pytest.mark.parametrize(("snapshot", "folder", "name"), [("tiny", "cases", "T200"), ("tiny_48k", "cases_48k", "T37")])
def test_chunks_of_any_size_decode_the_same(snapshot, folder, name, chunk):
    model, codes = snapshot_model(snapshot), load(folder, f"codes_{name}")
    pieces = [np.asarray(piece) for piece in model.codes2speech.stream(codes, chunk_frames=chunk)]
    assert len(pieces) == -(-len(codes) // chunk)
    joined = np.concatenate(pieces).reshape(-1)
    assert relative_rms(joined, model.codes2speech.infer(codes).samples) <= TOLERANCE
    assert relative_rms(joined, load(folder, f"audio_{name}")) <= TOLERANCE


def test_a_clip_past_one_step_decodes_the_same(monkeypatch):
    """`infer` works in steps of 512 frames and 2048 rows; smaller ones give the same audio."""
    model, codes = snapshot_model("tiny"), load("cases", "codes_T200")
    monkeypatch.setattr("audiollm.codec.doors.STEP_FRAMES", 33)
    monkeypatch.setattr("audiollm.vendor.moss_audio_tokenizer.codec.ROWS_PER_STEP", 50)
    monkeypatch.setattr("audiollm.vendor.moss_audio_tokenizer.stage.FEED_FORWARD_ROWS", 17)
    monkeypatch.setattr("audiollm.vendor.moss_audio_tokenizer.stage.QUERY_BLOCK_CPU", 9)
    assert relative_rms(model.codes2speech.infer(codes).samples, load("cases", "audio_T200")) <= TOLERANCE


def test_the_first_half_does_not_depend_on_what_follows():
    model, codes = snapshot_model("tiny"), load("cases", "codes_T200")
    other = codes.copy()
    other[100:] = (other[100:] + 511) % 1024
    half = 100 * 768
    alone = model.codes2speech.infer(codes[:100]).samples
    for whole in (codes, other):
        assert relative_rms(model.codes2speech.infer(whole).samples[:half], alone) <= TOLERANCE


@pytest.mark.parametrize(("snapshot", "folder"), [("tiny", "cases"), ("tiny_48k", "cases_48k")])
def test_every_stage_gives_what_the_published_one_gives(snapshot, folder):
    model = snapshot_model(snapshot)
    golden = np.load(DATA / folder / "stages_T5.npz")
    seen = model.capture(load(folder, "codes_T5"))
    assert relative_rms(seen.latents, golden["quantizer"]) <= TOLERANCE
    for i in range(6):
        assert relative_rms(seen.outputs[i], golden[f"decoder.{2 * i}"]) <= TOLERANCE
    assert relative_rms(seen.audio.samples[:, None], golden["decoder.11"]) <= TOLERANCE


@pytest.mark.parametrize("name", ["T1", "T5", "T37", "T5_mixed", "T5_prefix12"])
def test_a_gguf_decodes_as_the_loom_engine(name):
    audio = gguf_model().codes2speech.infer(gguf_codes(name))
    assert relative_rms(audio.samples, gguf_audio(name)) <= TOLERANCE


def test_the_installed_loom_engine_agrees():
    """Both decode the same file in one test; needs the test extra `loom-py-rt`."""
    loom = pytest.importorskip("loom", reason="loom-py-rt is not installed; it is in the test extra")
    rng = np.random.default_rng(7)
    codes = rng.integers(0, 65, (21, 32))
    theirs = loom.Model.from_file(GGUF, device="cpu").codes2speech.infer(codes.tolist())
    ours = gguf_model().codes2speech.infer(codes)
    assert (ours.sample_rate, ours.channels, len(ours)) == (theirs.sample_rate, theirs.channels, len(theirs))
    assert relative_rms(ours.samples, theirs.samples) <= TOLERANCE


def test_a_decoder_only_snapshot_decodes_as_its_gguf(tmp_path):
    (tmp_path / "config.json").write_bytes((DATA / "gguf" / "tiny_v2_config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((DATA / "gguf" / "tiny_v2.safetensors").read_bytes())
    model = codec.Model.from_pretrained(tmp_path, device="cpu")
    assert model.capabilities == ("codes2speech",)
    assert relative_rms(model.codes2speech.infer(gguf_codes("T37")).samples, gguf_audio("T37")) <= TOLERANCE


def test_encoding_gives_the_published_codes():
    model, wav = snapshot_model("tiny"), load("cases", "encode_wav")
    codes = model.speech2codes.infer(wav.T, sample_rate=4800)
    assert codes.dtype == np.int64
    np.testing.assert_array_equal(codes, load("cases", "encode_codes"))
    assert len(codes) == 2 * wav.shape[1] // 768


def test_encoding_in_steps_gives_the_same_codes(monkeypatch):
    monkeypatch.setattr("audiollm.codec.doors.STEP_FRAMES", 3)
    codes = snapshot_model("tiny").speech2codes.infer(load("cases", "encode_wav").T, sample_rate=4800)
    np.testing.assert_array_equal(codes, load("cases", "encode_codes"))


def test_every_encoder_stage_gives_what_the_published_one_gives():
    model = snapshot_model("tiny")
    wav, golden = load("cases", "encode_wav"), np.load(DATA / "cases" / "encode_stages.npz")
    whole = np.zeros((17 * 384, 2), dtype=np.float32)
    whole[: wav.shape[1]] = wav.T
    seen: dict[int, torch.Tensor] = {}

    def tap(stage, layer, rows):
        if layer == "output":
            seen[stage] = rows.clone()

    encode(model.encoder, whole.reshape(-1), 512, False, tap)
    for i in range(6):
        assert relative_rms(seen[i], golden[f"encoder.{2 * i + 1}"]) <= TOLERANCE
    ids = torch.from_numpy(load("cases", "encode_codes").astype(np.int64))
    with torch.inference_mode():
        assert relative_rms(dequantize(model.decoder.quantizer, ids), golden["quantized"][:16]) <= TOLERANCE


def test_the_round_trip_is_the_published_one():
    model = snapshot_model("tiny")
    codes = model.speech2codes.infer(load("cases", "encode_wav").T, sample_rate=4800)
    audio = model.codes2speech.infer(codes)
    assert relative_rms(audio.samples, load("cases", "encode_roundtrip_audio")) <= TOLERANCE


def test_the_full_size_has_the_published_tensors():
    config = parse_config(json.loads((DATA / "v2_config_full.json").read_text()))
    inventory = {}
    for line in (DATA / "tensor_inventory_v2_full.txt").read_text().splitlines():
        name, shape = line.split("\t")
        inventory[name] = tuple(json.loads(shape))
    assert decoder_shapes(config) | encoder_shapes(config) == inventory
    assert [stage.context for stage in config.decoder] == [125, 250, 400, 400, 400, 400]
    assert [stage.rate for stage in config.decoder] == [12.5, 25, 50, 100, 200, 400]
    assert (config.samples_per_frame, config.frame_rate) == (7680, 12.5)
    decoder = sum(int(np.prod(shape)) for name, shape in decoder_shapes(config).items() if name.startswith("decoder"))
    assert 1.060e9 < decoder < 1.062e9


def test_rotation_frequencies_are_the_float32_ones():
    """float64 angles are 4.5e-6 away at 30 s: the angle of the last row must be the float32 product."""
    from audiollm.vendor.moss_audio_tokenizer.stage import _rotation

    config = parse_config(json.loads((DATA / "v2_config_full.json").read_text())).decoder[5]
    start = 12_000
    turned = _rotation(config, start, 1, torch.zeros(1))[0, 0]
    index = torch.arange(32, dtype=torch.float32)
    frequency = torch.exp(index * (-np.log(10_000) * 2 / 64))
    angle = torch.tensor(float(start), dtype=torch.float32) * frequency
    torch.testing.assert_close(
        torch.view_as_real(turned), torch.stack([angle.cos(), angle.sin()], 1), atol=1e-6, rtol=0
    )
    exact = start * 10_000.0 ** (-2 * np.arange(32) / 64)
    assert np.abs(turned.real.numpy() - np.cos(exact)).max() > 1e-5  # the float64 angle is another
