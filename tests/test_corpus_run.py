"""A run: what is written, that it equals single requests, that it is continued, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import filelock
import numpy as np
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open

from audiollm import ArgumentError, AudioLLMError, Request, Waveform, demo
from audiollm.cli import main
from audiollm.corpus import RunError, UnknownClipError, embedding, extract, open_run, shards
from audiollm.corpus.local import run_local
from audiollm.corpus.preparing import Preparer

CLIPS = demo.clips()
ROWS = (
    [f"c{k},{CLIPS['mix']},,,{k * 0.5},{k * 0.5 + 1 + k % 3},jazz,{k}" for k in range(8)]
    + [f"two,{CLIPS['mix']},{CLIPS['drums']},Compare.,1,2.5,rock,8", f"whole,{CLIPS['bass']},,,,,funk,9"]
    + [
        "missing,nowhere.wav,,,,,x,10",
        f"late,{CLIPS['mix']},,,99,,x,11",
        f"odd,{CLIPS['mix']},,<sound><|AUDIO|>,,,x,12",
    ]
)
BAD = {"missing": "not_found", "late": "bad_argument", "odd": "control_token"}


@pytest.fixture(scope="module")
def manifest(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("manifest") / "clips.csv"
    path.write_text("\n".join(["id,audio_1,audio_2,prompt,start_s,end_s,genre,number", *ROWS]) + "\n")
    return path


@pytest.fixture(params=("mf", "moss"))
def session(request, session_mf, session_moss):
    return {"mf": session_mf, "moss": session_moss}[request.param]


def go(session, manifest, out, **more):
    more = {"dtype": "float32", "workers": 0, "what": ("projected", "contextual"), "layers": (0, 2, -1)} | more
    return extract(session, manifest, out, **more)


def single(session, clip: str) -> tuple[list, list]:
    """What the engine gives for one row by itself."""
    cells = next(row.split(",") for row in ROWS if row.startswith(f"{clip},"))
    start, end = (float(v) if v else None for v in cells[4:6])
    waves = []
    for path in filter(None, cells[1:3]):
        import soundfile

        samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
        first, last = (None if s is None else round(s * rate) for s in (start, end))
        waves.append(Waveform(samples[first:last].mean(axis=1), rate))
    batch = session.prepare([Request(cells[3], waves)])
    return session.extract_audio_embeddings(batch), session.extract_contextual_embeddings(batch, (0, 2, -1))


def test_a_run_equals_single_requests(session, manifest, tmp_path):
    run = go(session, manifest, tmp_path / "run", batch_tokens=1_000)
    assert len(run) == 13 and set(run.failures) == set(BAD)
    for clip in ("c0", "c5", "two", "whole"):
        audio, states = single(session, clip)
        for k in range(len(audio)):
            found = run[clip, k]
            assert found.tokens == len(audio[k].projected)
            torch.testing.assert_close(found.projected, audio[k].projected, atol=2e-5, rtol=1e-4)
            for layer in (0, 2, -1):
                torch.testing.assert_close(found.contextual[layer], states[k][layer], atol=2e-5, rtol=1e-4)
            assert np.allclose(found.seconds, audio[k].intervals)
    assert run["c3"].offset_s == 1.5 and run["c3"].labels == {"genre": "jazz", "number": 3}
    assert run["two", 1].name == "drums.flac" and run["two", 1].offset_s == 1.0
    for clip, code in BAD.items():
        with pytest.raises(AudioLLMError, match=f"'{clip}' failed") as caught:
            run[clip]
        assert caught.value.code == code


def test_raw_alone_and_in_bfloat16(session, manifest, tmp_path):
    run = go(session, manifest, tmp_path / "run", what="raw", dtype="bfloat16")
    audio, _ = single(session, "two")
    assert run["two", 1].raw.dtype == torch.bfloat16
    torch.testing.assert_close(run["two", 1].raw.float(), audio[1].raw, atol=2e-2, rtol=2e-2)
    with pytest.raises(UnknownClipError, match="projected is not in this run, which holds raw"):
        _ = run["two", 1].projected
    with pytest.raises(UnknownClipError, match="which holds none"):
        run["c0"].contextual[0]


@pytest.fixture(scope="module")
def finished(session_moss, manifest, tmp_path_factory) -> Path:
    """A whole run of several shards; read only."""
    out = tmp_path_factory.mktemp("finished") / "run"
    go(session_moss, manifest, out, shard_bytes=20_000)
    return out


@pytest.fixture
def run_copy(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_it_is_read_without_this_package(finished):
    """The index by pyarrow, which pandas and datasets read by too, and a shard by safetensors."""
    table = pq.read_table(finished / "index.parquet")
    assert {"id", "shard", "key", "shape", "dtype", "duration_s", "tokens", "error", "genre"} <= set(table.column_names)
    lines = table.to_pylist()
    line = next(line for line in lines if (line["id"], line["what"], line["layer"]) == ("c4", "contextual", 2))
    with safe_open(finished / line["shard"], framework="numpy") as shard:
        assert list(shard.get_tensor(line["key"]).shape) == line["shape"]
    assert len(list((finished / "shards").iterdir())) > 3
    assert json.loads((finished / "run.json").read_text())["arguments"]["layers"] == [0, 2, 5]


def test_pandas_reads_the_index(finished):
    pandas = pytest.importorskip("pandas", reason="needs pandas, which comes with Ray")
    index = pandas.read_parquet(finished / "index.parquet")
    line = index[(index.id == "c4") & (index.layer == 2)].iloc[0]
    with safe_open(finished / line.shard, framework="numpy") as shard:
        assert shard.get_tensor(line.key).shape == tuple(line["shape"])


def test_shards_are_bounded(finished):
    for path in (finished / "shards").iterdir():
        with safe_open(path, framework="pt") as shard:
            clips = {key.split(":")[0] for key in shard.keys()}  # noqa: SIM118  safe_open is no mapping
        assert path.stat().st_size < 30_000 or len(clips) == 1


def test_reading_by_id(finished):
    run = open_run(finished)
    assert repr(run) == ("Run('run': 13 rows, 3 failed; projected; contextual 0, 2, 5; pool none, float32, moss_music)")
    assert repr(run["c3"]) == "Clip('c3', source 0, 'mix.flac' from 1.5 s: 1.000 s, 13 tokens)"
    assert "c3" in run and "c33" not in run and sorted(run)[0] == "c0"
    with pytest.raises(UnknownClipError, match=r"'c33' is not in .*closest are"):
        run["c33"]
    with pytest.raises(KeyError):
        run["c33"]
    with pytest.raises(UnknownClipError, match=r"has the sources 0, 1; ask for run\['two', 1\]"):
        run["two"]
    with pytest.raises(UnknownClipError, match="layer 1 is not in this run, which holds 0, 2, 5"):
        run["c3"].contextual[1]
    assert torch.equal(run["c3"].contextual[-1], run["c3"].contextual[5]) and dict(run["c3"].contextual).keys() == {
        0,
        2,
        5,
    }
    assert run.verify() == ()


def test_to_arrays(finished):
    run = open_run(finished)
    means = run.to_arrays("contextual", layer=-1, pool="mean")
    assert repr(means) == "Arrays(contextual of layer 5: 11 rows of 32 numbers from 10 clips, labels genre, number)"
    at = means.ids.tolist().index("c4")
    assert np.allclose(means.values[at], run["c4"].contextual[5].mean(0)) and means.labels["number"][at] == 4
    assert means.seconds[at].tolist() == [0.0, 2.0]
    rows = run.to_arrays("contextual", layer=2)
    assert len(rows) == sum(run[clip].tokens for clip in run if clip not in BAD and clip != "two") + 2 * 19
    mine = rows.ids == "c4"
    assert np.array_equal(rows.values[mine], run["c4"].contextual[2]) and np.array_equal(
        rows.seconds[mine], run["c4"].seconds
    )
    assert set(rows.labels["genre"][mine]) == {"jazz"}
    with pytest.raises(ArgumentError, match="this run holds 0, 2, 5 of contextual"):
        run.to_arrays("contextual")
    with pytest.raises(ArgumentError, match="this run holds contextual, projected"):
        run.to_arrays("raw")
    with pytest.raises(ArgumentError, match="pool"):
        run.to_arrays("projected", pool="max")


@pytest.mark.parametrize("pool", ("mean", "segments:0.5", "labels"))
def test_pools(session_moss, manifest, tmp_path, finished, pool):
    if pool == "labels":
        rows = [f"{row.split(',')[0]},{a},{a + 0.5},{name}" for row in ROWS for a, name in ((0.0, "on"), (0.5, "off"))]
        (tmp_path / "labels.csv").write_text("\n".join(["id,start_s,end_s,label", *(r for r in rows if r[:2] != "c1")]))
        pool = f"labels:{tmp_path / 'labels.csv'}"
    run = go(session_moss, manifest, tmp_path / "run", pool=pool)
    whole = open_run(finished)
    states = whole["c4"].contextual[2]
    if pool == "mean":
        torch.testing.assert_close(run["c4"].contextual[2], states.mean(0), atol=1e-5, rtol=1e-4)
        assert len(run.to_arrays("contextual", 2)) == 11
    else:
        torch.testing.assert_close(
            run["c4"].contextual[2][:2], torch.stack([states[:6].mean(0), states[6:12].mean(0)]), atol=1e-5, rtol=1e-4
        )
        assert run["c4"].seconds[:2].tolist() == [[0, 0.5], [0.5, 1.0]]
    if pool.startswith("labels"):
        assert run["c4"].segments == ("on", "off") and "no interval for the id 'c1'" in run.failures["c1"]
        assert run.to_arrays("projected").segments.tolist()[:2] == ["on", "off"]


# Continuing.


def lines_of(out: Path) -> list[str]:
    """Every line of the index but where its tensors lie, sorted."""
    table = pyarrow.dataset.dataset(out / "index.parquet", format="parquet").to_table()
    return sorted(str({k: v for k, v in line.items() if k not in ("shard", "key")}) for line in table.to_pylist())


def same(one: Path, other: Path) -> None:
    """The same rows, once each, and the same numbers to rounding."""
    assert lines_of(one) == lines_of(other)
    first, second = open_run(one), open_run(other)
    for kind in (("projected", None), ("contextual", 0), ("contextual", 2), ("contextual", 5)):
        a, b = first.to_arrays(*kind), second.to_arrays(*kind)
        for clip in set(a.ids):
            np.testing.assert_allclose(a.values[a.ids == clip], b.values[b.ids == clip], atol=2e-5, rtol=1e-4)


class Counting:
    """The session, counting the rows that it is asked for."""

    def __init__(self, monkeypatch) -> None:
        self.rows: list[str] = []
        really = embedding._embedded
        monkeypatch.setattr(
            embedding,
            "_embedded",
            lambda session, ready, task: (
                self.rows.extend(h.row.id for h in ready.heard) or really(session, ready, task)
            ),
        )


def test_a_second_run_does_nothing(session_moss, manifest, run_copy, monkeypatch):
    before, counting = lines_of(run_copy), Counting(monkeypatch)
    go(session_moss, manifest, run_copy)
    assert counting.rows == [] and lines_of(run_copy) == before


def test_more_rows_are_added_to_a_run(session_moss, manifest, tmp_path, finished, monkeypatch):
    short = manifest.parent / "short.csv"
    short.write_text("\n".join(manifest.read_text().splitlines()[:5]) + "\n")
    go(session_moss, short, tmp_path / "run")
    counting = Counting(monkeypatch)
    go(session_moss, manifest, tmp_path / "run")
    assert "c0" not in counting.rows and "c5" in counting.rows
    same(tmp_path / "run", finished)


def test_what_fails_is_done_again_where_asked(session_moss, tmp_path, monkeypatch):
    (tmp_path / "clips.csv").write_text(f"id,audio\na,{CLIPS['bass']}\nb,b.flac\n")
    run = go(session_moss, tmp_path / "clips.csv", tmp_path / "run", what="projected")
    assert set(run.failures) == {"b"}
    shutil.copy(CLIPS["drums"], tmp_path / "b.flac")
    counting = Counting(monkeypatch)
    assert set(go(session_moss, tmp_path / "clips.csv", tmp_path / "run", what="projected").failures) == {"b"}
    assert counting.rows == []
    run = go(session_moss, tmp_path / "clips.csv", tmp_path / "run", what="projected", retry_errors=True)
    assert counting.rows == ["b"] and not run.failures and run["b"].tokens == run["a"].tokens


@pytest.mark.parametrize("damage", ("flipped", "cut", "gone", "part cut", "part gone"))
def test_damage_is_found_and_done_again(session_moss, manifest, finished, run_copy, damage):
    shard, part = sorted((run_copy / "shards").iterdir())[1], sorted((run_copy / "index.parquet").iterdir())[1]
    data = bytearray(shard.read_bytes())
    if damage == "flipped":
        data[-5] ^= 1
        shard.write_bytes(data)
        assert open_run(run_copy).verify() == (shard.stem,)
    elif damage == "cut":
        shard.write_bytes(data[:-100])
    elif damage == "part cut":
        part.write_bytes(part.read_bytes()[:-50])
        with pytest.raises(RunError, match="damaged index"):
            open_run(run_copy)
    else:
        (shard if damage == "gone" else part).unlink()
    go(session_moss, manifest, run_copy)
    same(run_copy, finished)
    assert open_run(run_copy).verify() == ()


def test_size_is_looked_at_without_verifying(session_moss, manifest, run_copy, monkeypatch):
    first, second = sorted((run_copy / "shards").iterdir())[:2]
    first.write_bytes(first.read_bytes()[:-1] + b"\0")
    second.write_bytes(b"")
    counting = Counting(monkeypatch)
    go(session_moss, manifest, run_copy, verify=False)
    assert counting.rows and open_run(run_copy).verify() in ((), (first.stem,))


def test_what_an_interrupted_writer_left_is_removed(session_moss, manifest, finished, run_copy):
    (run_copy / "shards" / "000099.safetensors").write_bytes(b"no part tells of it")
    (run_copy / "shards" / ".000100.safetensors.12.tmp").write_bytes(b"half")
    go(session_moss, manifest, run_copy)
    same(run_copy, finished)
    assert len(list((run_copy / "shards").iterdir())) == len(list((finished / "shards").iterdir()))


def test_a_damaged_shard_that_is_read(run_copy):
    for path in (run_copy / "shards").iterdir():
        path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(RunError, match="run the command that made it again"):
        _ = open_run(run_copy)["c0"].projected


@pytest.mark.parametrize(
    ("more", "said"),
    (
        ({"layers": (0, 2)}, r"layers \[0, 2, 5\], and \[0, 2\] is asked"),
        ({"what": "contextual"}, "what"),
        ({"pool": "mean"}, "pool 'none', and 'mean' is asked"),
        ({"prompt": "Else"}, "prompt"),
        ({"dtype": "bfloat16"}, "dtype"),
    ),
)
def test_other_arguments_refuse_to_mix(session_moss, manifest, run_copy, more, said):
    before = lines_of(run_copy)
    with pytest.raises(RunError, match=said) as caught:
        go(session_moss, manifest, run_copy, **more)
    assert caught.value.code == "bad_run" and lines_of(run_copy) == before


def test_the_same_layer_by_another_number_is_the_same(session_moss, manifest, run_copy, monkeypatch):
    counting = Counting(monkeypatch)
    go(session_moss, manifest, run_copy, layers=(0, -4, 5))
    assert counting.rows == []


def test_another_snapshot_refuses_to_mix(session_mf, manifest, run_copy):
    with pytest.raises(RunError, match="another snapshot"):
        go(session_mf, manifest, run_copy, layers=(0, 2, 4))


def test_another_file_of_labels_refuses_to_mix(session_moss, tmp_path):
    (tmp_path / "clips.csv").write_text(f"id,audio\na,{CLIPS['bass']}\n")
    for end in (1, 2):
        (tmp_path / "labels.csv").write_text(f"id,start_s,end_s,label\na,0,{end},x\n")
        if end == 1:
            go(session_moss, tmp_path / "clips.csv", tmp_path / "run", pool=f"labels:{tmp_path / 'labels.csv'}")
    with pytest.raises(RunError, match="pool_file_sha256"):
        go(session_moss, tmp_path / "clips.csv", tmp_path / "run", pool=f"labels:{tmp_path / 'labels.csv'}")


def test_another_clip_under_the_same_id_is_refused(session_moss, manifest, run_copy):
    changed = manifest.parent / "changed.csv"
    changed.write_text(manifest.read_text().replace(",1.5,2.5,", ",1.5,2.6,"))
    with pytest.raises(RunError, match="holds the id 'c3' of another clip"):
        go(session_moss, changed, run_copy)


def test_labels_keep_their_columns_and_types(session_moss, manifest, run_copy, tmp_path):
    lines = manifest.read_text().splitlines()
    other = manifest.parent / "other.csv"
    other.write_text("\n".join([lines[0].replace("genre", "style"), *lines[1:]]) + "\n")
    with pytest.raises(RunError, match=r"label columns \['genre', 'number'\]"):
        go(session_moss, other, run_copy)
    other.write_text("\n".join([*lines, f"new,{CLIPS['bass']},,,,,x,many"]) + "\n")
    with pytest.raises(RunError, match="holds int64 in the column number"):
        go(session_moss, other, run_copy)
    other.write_text("\n".join([*lines, f"new,{CLIPS['bass']},,,,,x,7.0"]) + "\n")
    assert go(session_moss, other, run_copy)["new"].labels["number"] == 7


def test_two_writers_refuse_each_other(session_moss, manifest, run_copy):
    with filelock.FileLock(run_copy / ".lock"), pytest.raises(RunError, match="another process is writing") as caught:
        go(session_moss, manifest, run_copy)
    assert caught.value.code == "locked"
    go(session_moss, manifest, run_copy)


def test_folders_that_are_no_runs(session_moss, manifest, tmp_path):
    (tmp_path / "photo.jpg").write_bytes(b"")
    with pytest.raises(RunError, match=r"holds 'photo.jpg' and no run\.json"):
        go(session_moss, manifest, tmp_path)
    with pytest.raises(RunError, match="is a file"):
        go(session_moss, manifest, tmp_path / "photo.jpg")
    with pytest.raises(RunError, match=r"has no run\.json"):
        open_run(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["photo.jpg"]


# Faults while writing.


@pytest.mark.parametrize("nth", (11, 12, 13))  # a shard, its folder, its part
def test_a_full_disk_keeps_what_was_written(session_moss, manifest, tmp_path, finished, monkeypatch, nth):
    really, count = os.fsync, []

    def fsync(handle: int) -> None:
        count.append(handle)
        if len(count) == nth:
            raise OSError(errno.ENOSPC, "No space left on device")
        really(handle)

    monkeypatch.setattr(shards.os, "fsync", fsync)
    with pytest.raises(RunError, match="make room and run the same command again") as caught:
        go(session_moss, manifest, tmp_path / "run", shard_bytes=20_000)
    assert caught.value.code == "disk_full"
    assert not list((tmp_path / "run").rglob(".*.tmp"))
    assert 0 < len(open_run(tmp_path / "run")) < 13
    go(session_moss, manifest, tmp_path / "run", shard_bytes=20_000)
    same(tmp_path / "run", finished)


def test_a_shard_is_on_the_disk_before_it_counts(tmp_path, monkeypatch):
    """Bytes, then the rename, then the folder; the part only after its shard."""
    seen = []
    monkeypatch.setattr(shards.os, "fsync", lambda handle: seen.append(os.readlink(f"/proc/self/fd/{handle}")))
    for name in ("shards", "index.parquet"):
        (tmp_path / name).mkdir()
    entry = embedding.Entry("a", {"a:0:raw": torch.zeros(2)}, [{"id": "a", "key": "a:0:raw"}])
    shards.write_shard(tmp_path, "000000", shards.pack([entry]), shards.schema(()))
    names = [Path(path).name for path in seen]
    assert [name.split(".")[1] if name.startswith(".") else name for name in names] == [
        "000000", "shards", "000000", "index.parquet",
    ]  # fmt: skip


def test_an_interrupt_keeps_what_is_done(session_moss, manifest, tmp_path, monkeypatch):
    really, calls = embedding._embedded, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return really(*arguments)

    monkeypatch.setattr(embedding, "_embedded", interrupted)
    with pytest.raises(KeyboardInterrupt):
        go(session_moss, manifest, tmp_path / "run", batch_tokens=100)
    assert 2 <= len(open_run(tmp_path / "run")) < 13


def test_a_batch_that_does_not_fit_is_halved(session_moss, manifest, tmp_path, finished, monkeypatch):
    really = embedding._embedded

    def small(session, ready, task):
        if len(ready.heard) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return really(session, ready, task)

    monkeypatch.setattr(embedding, "_embedded", small)
    go(session_moss, manifest, tmp_path / "run")
    same(tmp_path / "run", finished)

    def none(session, ready, task):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(embedding, "_embedded", none)
    run = go(session_moss, manifest, tmp_path / "other")
    assert set(run.failures) == set(run) and "does not fit the memory" in run.failures["c0"]


# Before it starts.


def test_sizes_are_told_and_refused(session_moss, manifest, tmp_path, caplog, monkeypatch):
    good = manifest.parent / "good.csv"
    good.write_text("\n".join(manifest.read_text().splitlines()[:-3]) + "\n")
    counting = Counting(monkeypatch)
    with pytest.raises(RunError, match=r"would take about .* are allowed") as caught:
        go(session_moss, good, tmp_path / "run", limit_bytes=1_000)
    assert caught.value.code == "too_large" and counting.rows == []
    with caplog.at_level("INFO", logger="audiollm"):
        run = go(session_moss, good, tmp_path / "run")
    told = next(r.message for r in caplog.records if "embeddings" in r.message)
    assert told.startswith("10 rows, about 0.0 h of audio and ")
    size = sum(p.stat().st_size for p in (run.path / "shards").iterdir())
    number, unit = told.split(" and ")[1].split(" of")[0].split()
    assert float(number) * {"KiB": 2**10, "MiB": 2**20}[unit] == pytest.approx(size, rel=0.15)


@pytest.mark.parametrize(
    "more",
    ({"what": "cooked"}, {"what": ()}, {"layers": 3}, {"layers": (6,)}, {"layers": ()}, {"dtype": "int8"}, {"engine": "spark"},
     {"pool": "max"}, {"workers": -1}, {"batch_tokens": 0}, {"device": "cpu"}, {"address": "auto"}, {"prompt": None}),
)  # fmt: skip
def test_arguments_are_checked_first(session_moss, manifest, tmp_path, more):
    with pytest.raises(ArgumentError, match=next(iter(more)).rstrip("s")):
        go(session_moss, manifest, tmp_path / "run", **more)
    assert not (tmp_path / "run").exists()


def test_nothing_is_loaded_before_a_refusal(tiny_moss, manifest, run_copy, monkeypatch):
    monkeypatch.setattr("audiollm.corpus.extraction.load_model", lambda *a: pytest.fail("the model was loaded"))
    monkeypatch.setattr("audiollm.snapshot.opened", lambda path: pytest.fail("a weight was read"))
    with pytest.raises(RunError, match="pool"):
        go(tiny_moss, manifest, run_copy, pool="mean", device="cpu")
    go(tiny_moss, manifest, run_copy, device="cpu")  # nothing is missing


def test_preparing_needs_no_weights_and_gives_the_same(session, manifest):
    """The adapter on the meta device and the session prepare bit for bit the same inputs."""
    from audiollm.corpus.manifest import read_manifest

    rows = [row for row in read_manifest(manifest).rows() if row.id in ("c0", "c5", "two", "odd", "whole")]
    preparer = Preparer.of(session.folder, "")
    assert all(p.is_meta for p in preparer.adapter.model.parameters())
    ready = preparer.prepare(rows)
    assert [f.row.id for f in ready.failures] == ["odd"]
    from audiollm.corpus.clip import hear

    rate = preparer.adapter.clock.sample_rate
    wanted = session.prepare([hear(row, "", rate, None)[1] for row in rows if row.id != "odd"])
    assert wanted.inputs.keys() == ready.batch.inputs.keys()
    for name, tensor in wanted.inputs.items():
        assert torch.equal(tensor, ready.batch.inputs[name]), name


def test_the_command_line(tiny_moss, manifest, tmp_path, capsys):
    command = [
        "extract", "--snapshot", str(tiny_moss), "--manifest", str(manifest), "--out", str(tmp_path / "run"), "--what",
        "projected,contextual", "--layers", "0,2,-1", "--pool", "mean", "--device", "cpu", "--workers", "0",
    ]  # fmt: skip
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "Run('run': 13 rows, 3 failed; projected; contextual 0, 2, 5; pool mean, bfloat16, moss_music)" in said
    assert "missing: " in said
    assert main([*command, "--dtype", "float32"]) == 1
    assert "was made with dtype 'bfloat16'" in capsys.readouterr().err


def test_a_loop_over_rows_stays_out_of_the_public_names():
    import audiollm.corpus

    assert sorted(audiollm.corpus.__all__) == list(audiollm.corpus.__all__) and callable(run_local)
    for name in audiollm.corpus.__all__:
        assert getattr(audiollm.corpus, name).__doc__
