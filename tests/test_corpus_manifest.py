"""A table of clips: what is read, what is refused, what a cut is, and how tokens are pooled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
import torch

from audiollm import ArgumentError, AudioError, RequestError, demo
from audiollm.audio import decode
from audiollm.corpus import ManifestError
from audiollm.corpus.batching import batches
from audiollm.corpus.clip import hear
from audiollm.corpus.manifest import Row, read_manifest
from audiollm.corpus.pooling import Pool
from audiollm.corpus.preparing import Cost
from audiollm.corpus.shards import COLUMNS

MIX = demo.clips()["mix"]


def written(folder: Path, text: str, name: str = "clips.csv") -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def test_a_csv_is_read_as_it_is_written(tmp_path):
    path = written(
        tmp_path,
        'id,audio,prompt,start_s,end_s,genre,bpm,key\n007,sub/a.wav,"two\nlines",1.50,,jazz,96,C\n'
        "NA,/abs/b.flac,,,2.5,,,\nこれ:0:raw,~/c.wav,,,,x,1,\n",
    )
    manifest = read_manifest(path, COLUMNS)
    first, second, third = manifest.rows()
    assert (first.id, first.prompt, first.start_s, first.end_s) == ("007", "two\nlines", "1.50", "")
    assert first.path(0) == tmp_path / "sub" / "a.wav"
    assert second.id == "NA" and second.path(0) == Path("/abs/b.flac")
    assert third.id == "これ:0:raw" and third.path(0) == Path("~/c.wav").expanduser()
    assert first.labels == {"genre": "jazz", "bpm": 96, "label_key": "C"}, "a label may not hide a column of the index"
    assert second.labels == {"genre": "", "bpm": None, "label_key": ""}


def test_several_sources_a_row_in_csv_and_parquet(tmp_path):
    path = written(tmp_path, "id,audio_1,audio_2,audio_3\na,m.wav,d.wav,\nb,m.wav,,\n")
    assert [row.audios for row in read_manifest(path).rows()] == [("m.wav", "d.wav"), ("m.wav",)]
    table = pa.table({"id": [7, 8], "audio": [["m.wav", "d.wav"], ["m.wav"]], "start_s": [0.5, None]})
    pq.write_table(table, tmp_path / "clips.parquet")
    rows = list(read_manifest(tmp_path / "clips.parquet").rows())
    assert [(row.id, row.audios, row.start_s) for row in rows] == [
        ("7", ("m.wav", "d.wav"), 0.5),
        ("8", ("m.wav",), None),
    ]


def test_a_folder_is_a_manifest(tmp_path):
    for name in ("b/x.FLAC", "a.wav", "b/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    manifest = read_manifest(tmp_path)
    assert manifest.ids() == ["a.wav", "b/x.FLAC"]
    assert next(manifest.rows()).path(0) == tmp_path / "a.wav"


@pytest.mark.parametrize(
    ("text", "said"),
    (
        ("id,file\na,b.wav\n", "needs id, and audio"),
        ("id,audio,audio_1\na,b.wav,c.wav\n", "use audio alone"),
        ("id,audio\na,b.wav\na,c.wav\n", r"the id\(s\) 'a' more than once"),
        ("id,audio\na,b.wav\n,c.wav\n", "no id in row 2"),
        ("id,audio\n", "holds no rows"),
        ("id,audio,x,x\na,b.wav,1,2\n", "column\\(s\\) x twice"),
        ("id,audio\na,b.wav,jazz\n", "Expected 2 columns, got 3"),
        ("id,audio,key,label_key\na,b.wav,C,D\n", "'label_key' beside 'key'"),
    ),
)
def test_what_is_no_manifest(tmp_path, text, said):
    with pytest.raises(ManifestError, match=said) as caught:
        read_manifest(written(tmp_path, text), COLUMNS)
    assert caught.value.code == "bad_manifest" and str(tmp_path) in caught.value.source


def test_manifests_that_are_not_there(tmp_path):
    with pytest.raises(ManifestError, match="cannot be found"):
        read_manifest(tmp_path / "none.csv")
    with pytest.raises(ManifestError, match="is not a manifest"):
        read_manifest(written(tmp_path, "x", "clips.txt"))
    with pytest.raises(ManifestError, match="holds no sound file"):
        read_manifest(tmp_path)
    pq.write_table(pa.table({"id": ["a"], "audio": [b"RIFF"]}), tmp_path / "bytes.parquet")
    with pytest.raises(ManifestError, match="holds binary in audio"):
        read_manifest(tmp_path / "bytes.parquet")


# Cuts.


def row(path: Path, **more) -> Row:
    return Row("a", (str(path),), Path("/"), **more)


@pytest.fixture
def odd_rate(tmp_path) -> Path:
    """A stereo file whose rate has no common second with the models'."""
    samples = np.random.default_rng(0).uniform(-0.5, 0.5, (44_100, 2)).astype(np.float32)
    soundfile.write(tmp_path / "odd.wav", samples, 22_050, subtype="FLOAT")
    return tmp_path / "odd.wav"


@pytest.mark.parametrize(("start_s", "end_s"), ((0.3, 1.1), (0.0, 0.7), (1.2, None), (1.5, 99.0)))
def test_a_cut_is_what_a_file_of_just_those_frames_is(odd_rate, tmp_path, start_s, end_s):
    samples, rate = soundfile.read(odd_rate, dtype="float32")
    first, end = round(start_s * rate), None if end_s is None else round(end_s * rate)
    soundfile.write(tmp_path / "cut.wav", samples[first:end], rate, subtype="FLOAT")
    heard, request = hear(row(odd_rate, start_s=start_s, end_s=end_s), "", 16_000, None)
    wanted = decode(tmp_path / "cut.wav", 16_000)
    assert np.array_equal(request.audios[0].samples, wanted.samples)
    assert heard.offsets_s == (first / rate,)
    assert heard.durations_s == (len(wanted.samples) / 16_000,)


def test_cutting_after_resampling_would_be_something_else(odd_rate):
    """The golden order matters: the filter must not hear what lies before the cut."""
    _, request = hear(row(odd_rate, start_s=0.3, end_s=1.1), "", 16_000, None)
    late = decode(odd_rate, 16_000).samples[4_800:17_600]
    assert len(late) == len(request.audios[0].samples) and not np.allclose(late, request.audios[0].samples, atol=1e-3)


@pytest.mark.parametrize(
    ("more", "kind", "said"),
    (
        ({"start_s": "soon"}, RequestError, "start_s is 'soon'"),
        ({"start_s": -1}, RequestError, "start_s is -1"),
        ({"end_s": float("nan")}, RequestError, "end_s is nan"),
        ({"start_s": 1.0, "end_s": 1.0}, RequestError, "ends after it starts"),
        ({"start_s": 2.0}, RequestError, "is 2.000 s long and start_s is 2"),
        ({"start_s": 1.0, "end_s": 1.000001}, AudioError, "no samples from frame 22050"),
    ),
)
def test_bad_cuts(odd_rate, more, kind, said):
    with pytest.raises(kind, match=said):
        hear(row(odd_rate, **more), "", 16_000, None)


def test_nan_in_a_cut_names_the_file(tmp_path):
    samples = np.zeros(16_000, np.float32)
    samples[9_000] = np.nan
    soundfile.write(tmp_path / "nan.wav", samples, 16_000, subtype="FLOAT")
    with pytest.raises(AudioError, match=r"nan\.wav from 0\.5 s: .*\[1000\] is nan") as caught:
        hear(row(tmp_path / "nan.wav", start_s=0.5), "", 16_000, None)
    assert caught.value.code == "non_finite"
    hear(row(tmp_path / "nan.wav", end_s=0.5), "", 16_000, None)


def test_what_is_said_of_a_file_is_kept(tmp_path):
    data = MIX.parent.joinpath("mix.flac")
    samples, rate = soundfile.read(data)
    soundfile.write(tmp_path / "whole.wav", samples, rate)
    (tmp_path / "half.wav").write_bytes((tmp_path / "whole.wav").read_bytes()[:400_000])
    heard, _ = hear(row(tmp_path / "half.wav"), "", 16_000, None)
    assert "half.wav" in heard.warning
    heard, request = hear(row(MIX), "Asked.", 16_000, 2.0)
    assert "only the first 2 s are used" in heard.warning and heard.durations_s == (2.0,)
    assert request.prompt == "Asked."


def test_a_row_without_audio():
    with pytest.raises(RequestError, match="'a' has no audio"):
        hear(Row("a", (), Path("/")), "", 16_000, None)


def test_the_digest_tells_clips_apart():
    plain = row(MIX, start_s="1.50")
    assert plain.digest == row(MIX, start_s=1.5).digest == row(MIX, start_s="1.5", end_s="").digest
    assert len({plain.digest, row(MIX).digest, row(MIX, end_s=1.5).digest, row(MIX, prompt="x").digest}) == 4


# Batches.


def test_batches_are_alike_and_within_the_budget():
    lengths = [5, 900, 60, 70, 80, 5, 10, 3_000, 65, 75, 100, 400, 420, 440]
    rows = [Row(str(k), (), Path("/")) for k in range(len(lengths))]
    costs = {row.id: Cost(n, n) for row, n in zip(rows, lengths, strict=True)}
    groups = list(batches(rows, lambda row: costs[row.id], 1_000))
    assert sorted(row.id for group in groups for row in group) == sorted(costs)
    for group in groups:
        tokens = [costs[row.id].tokens for row in group]
        assert max(tokens) * len(tokens) <= 1_000 or len(group) == 1
        assert max(tokens) * len(tokens) - sum(tokens) <= max(0.15 * sum(tokens), 128)
    assert len(groups) < 9


def test_encoder_windows_count_as_well():
    """Short clips take whole windows in the tower: a hundred of them are not one batch."""
    rows = [Row(str(k), (), Path("/")) for k in range(20)]
    assert [len(group) for group in batches(rows, lambda row: Cost(10, 750), 3_000)] == [4] * 5


# Pooling.

SECONDS = np.stack([np.arange(10) * 0.4, np.arange(1, 11) * 0.4], axis=1)
STATES = torch.arange(20.0).reshape(10, 2)


def pooled(pool: Pool, clip: str = "a") -> tuple[torch.Tensor, np.ndarray]:
    groups = pool.groups(clip, SECONDS)
    return groups.apply(STATES), groups.seconds


def test_none_and_mean():
    states, seconds = pooled(Pool.parse("none"))
    assert torch.equal(states, STATES) and np.array_equal(seconds, SECONDS)
    states, seconds = pooled(Pool.parse("mean"))
    assert torch.equal(states, STATES.mean(0)) and seconds.tolist() == [[0.0, 4.0]]


def test_segments_take_tokens_by_their_centres():
    states, seconds = pooled(Pool.parse("segments:1"))  # centres 0.2, 0.6 | 1.0, 1.4, 1.8 | 2.2, 2.6 | 3.0, 3.4, 3.8
    rows = [STATES[0:2], STATES[2:5], STATES[5:7], STATES[7:10]]
    assert torch.allclose(states, torch.stack([r.mean(0) for r in rows]))
    assert seconds.tolist() == [[0, 1], [1, 2], [2, 3], [3, 4]]
    states, seconds = pooled(Pool.parse("segments:3.9"))
    assert len(states) == 1 and seconds.tolist() == [[0, 3.9]], "the last 0.1 s hold no centre"
    with pytest.raises(ArgumentError, match="shorter than one audio token"):
        Pool.parse("segments:0.1").check_token(0.4)


def test_labels_by_a_file(tmp_path):
    path = written(
        tmp_path, "id,start_s,end_s,label\na,0,1,verse\na,1.81,1.9,hit\na,3,9,end\na,5,6,late\nb,8,9,x\n", "l.csv"
    )
    pool = Pool.parse(f"labels:{path}")
    groups = pool.groups("a", SECONDS)
    assert groups.names == ("verse", "hit", "end")
    assert torch.allclose(groups.apply(STATES), torch.stack([STATES[0:2].mean(0), STATES[4], STATES[7:10].mean(0)]))
    assert groups.seconds.tolist() == [[0, 1], [1.81, 1.9], [3, 4.0]]
    with pytest.raises(RequestError, match="no interval for the id 'c'"):
        pool.groups("c", SECONDS)
    with pytest.raises(RequestError, match=r"within its 4\.000 s"):
        pool.groups("b", SECONDS)


@pytest.mark.parametrize("text", ("", "median", "segments", "segments:", "segments:-1", "segments:inf", "labels:", 5))
def test_what_is_no_pool(text):
    with pytest.raises(ArgumentError, match="pool"):
        Pool.parse(text)


@pytest.mark.parametrize(
    "text", ("id,start_s,end_s\na,0,1\n", "id,start_s,end_s,label\na,1,1,x\n", "id,start_s,end_s,label\na,x,1,x\n")
)
def test_what_is_no_table_of_intervals(tmp_path, text):
    with pytest.raises(ManifestError, match=r"l\.csv"):
        Pool.parse(f"labels:{written(tmp_path, text, 'l.csv')}")
