"""`audiollm decode` and `audiollm encode`, the embedded snapshot, and the README's example."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import numpy as np
import pytest
import soundfile
from codec_cases import DATA, GGUF, gguf_codes, gguf_model

from audiollm import codec
from audiollm.codec.cli import add_parsers
from audiollm.codec.example import demo_folder
from audiollm.errors import AudioLLMError

ROOT = Path(__file__).parent.parent


def run(*words: object) -> int:
    parser = argparse.ArgumentParser()
    add_parsers(parser.add_subparsers(required=True))
    args = parser.parse_args([str(word) for word in words])
    return args.run(args)


def test_decode_writes_what_save_writes(tmp_path, capsys):
    np.save(tmp_path / "codes.npy", gguf_codes("T37"))
    out = tmp_path / "out.wav"
    assert run("decode", tmp_path / "codes.npy", out, "--model", GGUF, "--device", "cpu") == 0
    gguf_model().codes2speech.infer(gguf_codes("T37")).save(tmp_path / "same.wav")
    assert out.read_bytes() == (tmp_path / "same.wav").read_bytes()
    assert "2.96 s, 48000 Hz, 2 channels" in capsys.readouterr().out
    assert run("decode", tmp_path / "codes.npy", out, "--model", GGUF, "--codebooks", 12) == 0
    gguf_model().codes2speech.infer(gguf_codes("T37"), num_codebooks=12).save(tmp_path / "same.wav")
    assert out.read_bytes() == (tmp_path / "same.wav").read_bytes()


def test_the_ceiling_of_decode_can_be_moved(tmp_path):
    np.save(tmp_path / "codes.npy", gguf_codes("T5"))
    words = ("decode", tmp_path / "codes.npy", tmp_path / "out.wav", "--model", GGUF, "--max-frames")
    with pytest.raises(codec.CodesError):
        run(*words, 4)
    assert not list(tmp_path.glob("out*"))
    assert run(*words, 0) == 0


def test_a_decode_that_stops_leaves_no_part_of_a_file(tmp_path, monkeypatch):
    np.save(tmp_path / "codes.npy", gguf_codes("T5"))

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("audiollm.codec.decoding.decode_piece", stop)
    (tmp_path / "out.wav").write_text("before")
    with pytest.raises(KeyboardInterrupt):
        run("decode", tmp_path / "codes.npy", tmp_path / "out.wav", "--model", GGUF)
    assert (tmp_path / "out.wav").read_text() == "before" and not list(tmp_path.glob("*.part"))


def test_encode_writes_codes_that_decode_reads(tmp_path, capsys):
    wav = np.load(DATA / "cases" / "encode_wav.npy").T
    soundfile.write(tmp_path / "clip.wav", wav, 4800, subtype="FLOAT")
    assert run("encode", tmp_path / "clip.wav", tmp_path / "codes.npy", "--model", DATA / "tiny") == 0
    codes = np.load(tmp_path / "codes.npy")
    np.testing.assert_array_equal(codes, np.load(DATA / "cases" / "encode_codes.npy"))
    assert "16 frames of 32 codes" in capsys.readouterr().out
    assert run("decode", tmp_path / "codes.npy", tmp_path / "back.wav", "--model", DATA / "tiny") == 0


@pytest.mark.parametrize("content", [b"", b"not numpy", b"\x93NUMPY\x01\x00\xff\xff"])
def test_codes_that_are_no_npy_are_refused(tmp_path, content):
    (tmp_path / "codes.npy").write_bytes(content)
    with pytest.raises(codec.CodesError):
        run("decode", tmp_path / "codes.npy", tmp_path / "out.wav", "--model", GGUF)


def test_pickled_codes_are_never_loaded(tmp_path):
    np.save(tmp_path / "codes.npy", np.array([[1, "x"]], dtype=object), allow_pickle=True)
    with pytest.raises(codec.CodesError):
        run("decode", tmp_path / "codes.npy", tmp_path / "out.wav", "--model", GGUF)


@pytest.mark.parametrize(
    "words", [("decode", "none.npy", "o.wav", "--model", GGUF), ("encode", "none.wav", "o.npy", "--model", "demo")]
)
def test_a_missing_input_is_our_error(words):
    with pytest.raises(AudioLLMError) as error:
        run(*words)
    assert error.value.code == "not_found"


def test_the_embedded_snapshot_is_small_and_says_that_it_is_random():
    files = list(demo_folder().iterdir())
    assert sum(path.stat().st_size for path in files) < 2_500_000
    assert "RANDOM" in json.loads((demo_folder() / "config.json").read_text())["notice"]
    assert "RANDOM" in codec.demo_model.__doc__
    model, codes = codec.demo_model(), codec.demo_codes()
    assert (model.config.sample_rate, model.config.channels, model.config.frame_rate) == (48000, 2, 12.5)
    assert [stage.context for stage in model.config.decoder] == [125, 250, 400, 400, 400, 400]
    audio = model.codes2speech.infer(codes)
    assert audio.duration == 2.0 and 0.02 < np.abs(audio.samples).max() < 1.5
    again = model.speech2codes.infer(audio)
    assert again.shape == (25, 32)


def test_the_demo_tells_that_it_is_random_and_is_the_same_every_time():
    one, two = codec.run_demo(), codec.run_demo()
    assert "random weights" in one.lines[0] and "random weights" in one._repr_html_()
    assert one.lines == two.lines and one._repr_html_() == two._repr_html_()
    assert "http" not in one._repr_html_() and list(one.difference.depths) == [1, 4, 12, 24]


def test_every_public_name_is_there():
    for name in codec.__all__:
        assert getattr(codec, name) is not None
    assert set(codec.__all__) == set(codec._HOME) and set(codec.__all__) <= set(dir(codec))
    with pytest.raises(AttributeError, match="Modell"):
        codec.Modell  # noqa: B018


def example_of(name: str, text: str) -> str:
    blocks = re.findall(rf"<!-- {name} -->\s*```python\n(.*?)```", text, flags=re.DOTALL)
    return blocks[0] if blocks else ""


def test_the_readme_example_runs_as_written(tmp_path, monkeypatch):
    pages = [ROOT / name for name in ("README.codec.md", "README.md") if (ROOT / name).is_file()]
    example = next(filter(None, (example_of("codec-example", page.read_text()) for page in pages)), "")
    assert example, "no README holds the codec's example"
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(compile(example, "README", "exec"), names)
    assert (tmp_path / "codec.wav").stat().st_size > 300_000
