"""The loom door's names and behaviour: a script written for `import loom` runs on audiollm.codec."""

from __future__ import annotations

import shutil
import textwrap
import wave

import numpy as np
import pytest
import torch
from codec_cases import DATA, GGUF, TOLERANCE, gguf_codes, gguf_model, relative_rms, rewrite_gguf, snapshot_model

from audiollm import codec
from audiollm.errors import ArgumentError, AudioLLMError

# The example of the model's card, with its cache argument.
CARD = """
from audiollm import codec as loom

model = loom.Model.from_pretrained("loom-ai-org/moss-audio-tokenizer-v2-loom", cache_dir=cache)
n_codebooks = model.hparam("codec.n_codebooks")
frame_rate = model.hparam("codec.frame_rate", "f32")
rate, channels = model.contract["sample_rate"], model.contract["channels"]

codes = [[(7 * t + 3 * k) % 64 for k in range(n_codebooks)] for t in range(25)]   # 2 s, one row per frame
audio = model.codes2speech.infer(codes)
audio.save(str(out))

flat = model.infer(codes=[float(c) for row in codes for c in row])                # the driver's own call
prefix = model.codes2speech.infer([row[:12] for row in codes])                    # 12 of the 32 codebooks
try:
    model.text2speech.infer("hello")
except loom.UnsupportedTask as error:
    refused = str(error)
"""


@pytest.fixture
def cache(tmp_path):
    """A hub cache that holds one small GGUF."""
    repo = tmp_path / "hub" / "models--loom-ai-org--moss-audio-tokenizer-v2-loom"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0" * 40)
    (repo / "snapshots" / ("0" * 40)).mkdir(parents=True)
    shutil.copy(GGUF, repo / "snapshots" / ("0" * 40) / "moss-audio-tokenizer-v2-f32.gguf")
    return tmp_path / "hub"


def test_the_model_cards_example_runs(cache, tmp_path):
    names: dict = {"cache": cache, "out": tmp_path / "out.wav"}
    exec(CARD, names)
    assert (names["n_codebooks"], names["frame_rate"], names["rate"], names["channels"]) == (32, 12.5, 48000, 2)
    assert isinstance(names["flat"], list) and len(names["flat"]) == 25 * 7680
    np.testing.assert_array_equal(np.float32(names["flat"]), names["audio"].samples)
    assert np.asarray(names["audio"]).shape == (25 * 3840, 2) == np.asarray(names["prefix"]).shape
    with wave.open(str(tmp_path / "out.wav")) as file:
        assert (file.getnframes(), file.getframerate(), file.getnchannels()) == (25 * 3840, 48000, 2)
    assert "codes2speech" in names["refused"]


def test_the_example_means_the_same_to_loom_itself(cache, tmp_path):
    loom = pytest.importorskip("loom", reason="loom-py-rt is not installed; it is in the test extra")
    theirs = loom.Model.from_file(next(cache.rglob("*.gguf")), device="cpu")
    ours = codec.Model.from_pretrained("loom-ai-org/moss-audio-tokenizer-v2-loom", cache_dir=cache, device="cpu")
    assert ours.contract == theirs.contract
    for name in ("capabilities", "task", "architecture", "driver_source", "topologies", "has_driver", "tokenizer"):
        assert getattr(ours, name) == getattr(theirs, name), name
    for key, kind in (("codec.n_codebooks", "u32"), ("codec.frame_rate", "f32"), ("task", "str"), ("channels", "u32")):
        assert ours.hparam(key, kind) == theirs.hparam(key, kind)
    for key, kind in (("nope", "u32"), ("codec.frame_rate", "u32"), ("codec.n_codebooks", "f32"), ("channels", "str")):
        with pytest.raises(loom.LoomError):
            theirs.hparam(key, kind)
        with pytest.raises(codec.LoomError):
            ours.hparam(key, kind)
    doors = [name for name in dir(theirs) if "2" in name]
    assert set(doors) <= set(dir(ours))
    for name in doors:
        assert getattr(ours, name).supported == getattr(theirs, name).supported
    sound = theirs.codes2speech.infer(gguf_codes("T5").tolist())
    same = codec.Audio(sound.samples, sound.sample_rate, sound.channels)
    sound.save(str(tmp_path / "theirs.wav"))
    same.save(tmp_path / "ours.wav")
    assert (tmp_path / "ours.wav").read_bytes() == (tmp_path / "theirs.wav").read_bytes()
    assert (len(same), same.duration) == (len(sound), sound.duration)
    np.testing.assert_array_equal(np.asarray(same), np.asarray(sound))


@pytest.mark.parametrize("door", ["text2speech", "speech2text", "text2codes", "image2class", "speech2codes"])
def test_other_doors_name_the_right_one(door):
    with pytest.raises(codec.UnsupportedTask, match=r"codes2speech\.infer") as error:
        getattr(gguf_model(), door).infer("anything")
    assert isinstance(error.value, NotImplementedError) and not isinstance(error.value, codec.LoomError)
    assert error.value.code == "unsupported"
    assert not getattr(gguf_model(), door).supported


def test_a_door_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="text2smell"):
        gguf_model().text2smell  # noqa: B018


def test_infer_takes_codes_and_nothing_else():
    model, codes = gguf_model(), gguf_codes("T1")
    for call in (
        lambda: model.infer(codes=codes.reshape(-1).tolist(), temperature=1.0),
        lambda: model.infer(tokens=[1]),
        lambda: model.codes2speech.infer(codes, sample_rate=48000),
        lambda: model.codes2speech.infer(codes, num_codebook=12),
        lambda: model.codes2speech.stream(codes, chunk=3),
    ):
        with pytest.raises(codec.KeywordError) as error:
            call()
        assert isinstance(error.value, TypeError) and error.value.code == "bad_argument"
    with pytest.raises(codec.KeywordError, match="did you mean num_codebooks"):
        model.codes2speech.infer(codes, num_codebook=12)
    with pytest.raises(ArgumentError):
        model.infer()


def test_hparam_says_what_there_is():
    model = snapshot_model("tiny")
    assert model.hparam("codec.absent_code") == 1024
    with pytest.raises(codec.LoomError, match=r"did you mean codec\.n_codebooks"):
        model.hparam("codec.n_codebook")
    with pytest.raises(codec.LoomError, match="kind='f32'"):
        model.hparam("codec.frame_rate")
    with pytest.raises(ValueError, match="u16"):
        model.hparam("codec.n_codebooks", "u16")


def test_a_snapshot_answers_to_the_same_names():
    model = snapshot_model("tiny_48k")
    assert model.capabilities == ("codes2speech", "speech2codes")
    assert {"declared", "task", "input_kind", "output_kind", "interface", "sample_rate"} < set(model.contract)
    assert set(model.contract) == set(gguf_model().contract)
    assert model.contract["declared"] is True and model.task == "audio-codec"
    assert "codes" in model.driver_source and model.architecture == "moss-audio-tokenizer"
    assert model.device == "cpu" and model.tokenizer is None and model.topologies == []


def test_a_driver_is_text_and_never_runs(tmp_path):
    mark = tmp_path / "mark"
    lua = f'os.execute("touch {mark}")\nio.open("{mark}", "w")\nfunction infer(inputs) return {{}} end\n'
    model = codec.Model.from_file(
        rewrite_gguf(tmp_path / "m.gguf", metadata={"model.driver_script": lua}), device="cpu"
    )
    assert model.driver_source == lua
    assert len(model.infer(codes=[0] * 32)) == 7680
    assert not mark.exists()


def test_contract_of_reads_the_header_alone(tmp_path):
    assert codec.contract_of(GGUF) == gguf_model().contract
    other = rewrite_gguf(tmp_path / "o.gguf", metadata={"loom.architecture": "lfm2", "loom.input.kind": "text"})
    assert codec.contract_of(other)["interface"] == ""
    bare = dict.fromkeys(("loom.task", "loom.input.kind", "loom.output.kind"))
    model = codec.Model.from_file(rewrite_gguf(tmp_path / "b.gguf", metadata=bare), device="cpu")
    assert model.contract["declared"] is False and len(model.codes2speech.infer(gguf_codes("T1"))) == 7680


def test_a_name_is_looked_up_in_the_cache_only(cache, tmp_path):
    for name in ("loom-ai-org/absent", "not a name", "/no/such/folder", "a/b/c", ""):
        with pytest.raises(codec.ModelNotFoundError, match="from_file") as error:
            codec.Model.from_pretrained(name, cache_dir=tmp_path / "none", device="cpu")
        assert error.value.code == "not_found" and isinstance(error.value, FileNotFoundError)
    with pytest.raises(codec.ModelNotFoundError):
        codec.Model.from_pretrained("loom-ai-org/moss-audio-tokenizer-v2-loom", revision="v2", cache_dir=cache)
    second = next(cache.rglob("*.gguf")).with_name("other.gguf")
    shutil.copy(GGUF, second)
    with pytest.raises(codec.ModelNotFoundError, match=r"2 GGUF files: .*filename="):
        codec.Model.from_pretrained("loom-ai-org/moss-audio-tokenizer-v2-loom", cache_dir=cache)
    named = codec.Model.from_pretrained(
        "loom-ai-org/moss-audio-tokenizer-v2-loom", "other.gguf", cache_dir=cache, token="secret", device="cpu"
    )
    assert named.path.name == "other.gguf"


def test_a_folder_or_file_is_taken_as_a_path(tmp_path):
    assert codec.Model.from_pretrained(GGUF, device="cpu").path == GGUF
    folder = tmp_path / "one"
    folder.mkdir()
    with pytest.raises(codec.ModelNotFoundError, match=r"neither config\.json nor a \.gguf file"):
        codec.Model.from_pretrained(folder)
    shutil.copy(GGUF, folder / "m.gguf")
    assert codec.Model.from_pretrained(folder, device="cpu").path.name == "m.gguf"


@pytest.mark.parametrize("device", ["npu", "tpu9", "cuda:99", "meta", "Vulkan0"])
def test_a_device_that_is_not_here_is_refused_before_the_file_is_read(device):
    with pytest.raises(ArgumentError) as error:
        codec.Model.from_file("/no/such/file.gguf", device=device)
    assert error.value.code == "bad_device"


def test_devices_are_listed_and_named():
    names = [device["name"] for device in codec.devices()]
    assert "cpu" in names
    assert codec.Model.from_file(GGUF, device="CPU").device == "cpu"
    if not torch.cuda.is_available():
        assert codec.Model.from_file(GGUF).device == "cpu"
        with pytest.raises(ArgumentError):
            codec.Model.from_file(GGUF, device="gpu")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 2e-6), (torch.float16, 2e-2), (torch.bfloat16, 1e-1)])
def test_other_dtypes_decode_alike(dtype, tolerance):
    model = codec.Model.from_file(GGUF, device="cpu", dtype=dtype)
    codes = gguf_codes("T37")
    audio = model.codes2speech.infer(codes)
    assert model.dtype == dtype and audio.samples.dtype == np.float32
    assert relative_rms(audio.samples, gguf_model().codes2speech.infer(codes).samples) <= tolerance
    pieces = [piece.samples for piece in model.codes2speech.stream(codes, 5)]
    assert relative_rms(np.concatenate(pieces), audio.samples) <= tolerance


def test_a_dtype_that_is_none_is_refused():
    for dtype in (torch.int8, "float32", None):
        with pytest.raises(ArgumentError):
            codec.Model.from_file(GGUF, dtype=dtype)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_gpu_decodes_the_same():
    model = codec.Model.from_file(GGUF, device="cuda")
    codes = gguf_codes("T37")
    assert (
        relative_rms(model.codes2speech.infer(codes).samples, gguf_model().codes2speech.infer(codes).samples)
        <= TOLERANCE
    )


def test_results_need_no_gradient_and_leave_torch_as_it_was():
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    stream = gguf_model().codes2speech.stream(gguf_codes("T5"), 2)
    next(stream)
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    seen = gguf_model().capture(gguf_codes("T5"), stages=0)
    probe = torch.nn.Linear(32, 1)
    probe(seen.outputs[0]).sum().backward()  # captured states can be trained on
    assert probe.weight.grad is not None


def test_runs_are_in_inference_mode_inside():
    from audiollm.codec.decoding import decode, encode

    model, modes = snapshot_model("tiny"), []

    def tap(*_):
        modes.append(torch.is_inference_mode_enabled())

    list(decode(model.decoder, np.zeros((2, 32), dtype=np.int64), 1, False, tap))
    encode(model.encoder, np.zeros(768, dtype=np.float32), 1, False, tap)
    assert modes and all(modes)


def test_an_interrupted_decode_leaves_a_usable_model(monkeypatch):
    model, codes = gguf_model(), gguf_codes("T37")
    before = model.codes2speech.infer(codes).samples
    live = model.codes2speech.live()
    live.push(codes[:5])
    from audiollm.vendor.moss_audio_tokenizer import stage

    attend, calls = stage._attend, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return attend(*args)

    for call in (lambda: model.codes2speech.infer(codes), lambda: live.push(codes[5:])):
        calls.clear()
        monkeypatch.setattr(stage, "_attend", interrupted)
        with pytest.raises(KeyboardInterrupt):
            call()
        monkeypatch.undo()
    np.testing.assert_array_equal(model.codes2speech.infer(codes).samples, before)
    with pytest.raises(codec.CodecError, match="interrupted"):
        live.push(codes[5:])


def test_live_frames_decode_as_the_whole_clip():
    model, codes = snapshot_model("tiny"), np.load(DATA / "cases" / "codes_T200.npy")
    live, pieces, at = model.codes2speech.live(max_frames=200), [], 0
    for size in (1, 25, 3, 100, 71):
        pieces.append(live.push(codes[at : at + size]).samples)
        at += size
    assert live.frames == 200
    assert relative_rms(np.concatenate(pieces), model.codes2speech.infer(codes).samples) <= TOLERANCE
    with pytest.raises(codec.CodesError) as error:
        live.push(codes[:1])
    assert error.value.code == "too_many_frames"


def test_carried_windows_are_flat_in_length():
    model, codes = snapshot_model("tiny"), np.load(DATA / "cases" / "codes_T200.npy")
    live = model.codes2speech.live()
    sizes = []
    for start in range(0, 200, 40):
        live.push(codes[start : start + 40])
        sizes.append(live.nbytes)
    assert len(set(sizes)) == 1
    windows = sum(2 * s.layers * (s.context - 1) * s.d_model * 4 for s in model.config.decoder)
    assert sizes[0] == windows


def test_a_stream_checks_its_arguments_at_once():
    model = gguf_model()
    with pytest.raises(codec.CodesError):
        model.codes2speech.stream([[65] * 32])
    for chunk in (0, -1, 2.5, True, None):
        with pytest.raises(ArgumentError) as error:
            model.codes2speech.stream(gguf_codes("T5"), chunk)
        assert error.value.source == "chunk_frames"


def test_progress_is_silent_when_not_a_terminal_and_insists_when_asked(capsys):
    model, codes = gguf_model(), gguf_codes("T5")
    model.codes2speech.infer(codes)
    assert capsys.readouterr() == ("", "")
    model.codes2speech.infer(codes, progress=True)
    assert "decode" in capsys.readouterr().err


@pytest.mark.parametrize("chunk", [1, 7, 200])
def test_progress_ends_at_the_length_of_the_clip(monkeypatch, chunk):
    from audiollm.codec import decoding

    told: list[float] = []
    monkeypatch.setattr(decoding.tqdm, "update", lambda self, n: told.append(n))
    list(gguf_model().codes2speech.stream(gguf_codes("T37"), chunk, progress=True))
    assert abs(sum(told) - 37 / 12.5) < 1e-6 and min(told) > 0


def test_reprs_are_the_same_every_time():
    for value in (gguf_model(), gguf_model().codes2speech.infer(gguf_codes("T1")), gguf_model().text2speech):
        assert repr(value) == repr(value) and "0x" not in repr(value)
    assert gguf_model()._repr_html_() == codec.Model.from_file(GGUF, device="cpu")._repr_html_()
    assert "decoder.10" in gguf_model()._repr_html_()


def test_errors_keep_code_and_source_through_pickle():
    import pickle

    for kind in (
        codec.CodecError,
        codec.CodesError,
        codec.ModelFileError,
        codec.ModelNotFoundError,
        codec.UnsupportedTask,
        codec.KeywordError,
    ):
        error = pickle.loads(pickle.dumps(kind("words", code="bad_codes", source="here")))
        assert (type(error), str(error), error.code, error.source) == (kind, "words", "bad_codes", "here")
        assert isinstance(error, AudioLLMError)


def test_importing_the_door_is_light():
    import subprocess
    import sys

    program = "import sys; import audiollm.codec.cli; assert 'torch' not in sys.modules, 'torch'; print('light')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=DATA.parents[2])
    assert done.stdout.strip() == "light", textwrap.shorten(done.stderr, 500)
