"""The Ray engine: its steps by themselves, and a real Ray with two workers, of which the one with the model is shot."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from audiollm import ArgumentError, SnapshotError, demo
from audiollm.corpus import extract, open_run, shards
from audiollm.corpus.embedding import Entry
from audiollm.corpus.manifest import read_manifest
from audiollm.corpus.on_ray import _connect, _Embed, _Prepare, _units
from audiollm.corpus.task import Task
from audiollm.corpus.units import carried, unit_of, write_unit

HERE = Path(__file__).parent
CLIPS = demo.clips()


@pytest.fixture(scope="module")
def manifest(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("manifest") / "clips.csv"
    rows = [f"c{k},{CLIPS['long_mix']},{k * 0.5},{k * 0.5 + 4 + k % 3},{k}" for k in range(45)]
    path.write_text("\n".join(["id,audio,start_s,end_s,number", *rows, "bad,nowhere.wav,,,45"]) + "\n")
    return path


@pytest.fixture(scope="module")
def alone(session_moss, manifest, tmp_path_factory) -> Path:
    """The run of the local engine."""
    out = tmp_path_factory.mktemp("alone") / "run"
    extract(session_moss, manifest, out, what="projected", dtype="float32", workers=0)
    return out


def same(run, alone) -> None:
    assert sorted(run.index["id"].to_pylist()) == sorted(alone.index["id"].to_pylist()), "a row is not there once"
    assert set(run.failures) == {"bad"}
    for clip in set(alone) - {"bad"}:
        np.testing.assert_allclose(run[clip].projected, alone[clip].projected, atol=2e-5, rtol=1e-4)
        assert run[clip].labels == alone[clip].labels


def test_the_steps_make_the_same_run(session_moss, tiny_moss, manifest, alone, tmp_path):
    clips = read_manifest(manifest, shards.COLUMNS)
    task = Task.of(session_moss._adapter, "projected", (-1,), "none", "", "float32")
    index = shards.schema(clips.label_fields())
    prepare = _Prepare(str(tiny_moss), task, 1_000)
    embed = _Embed(str(tiny_moss), task, 1_000, "cpu", torch.float32)
    for name in ("shards", "index.parquet"):
        (tmp_path / name).mkdir()
    (tmp_path / "run.json").write_text((alone / "run.json").read_text())
    rows = 0
    for unit in _units(clips, list(range(len(clips))), 10):
        answer = write_unit(embed(prepare(unit_of(*unit))), str(tmp_path), index)
        rows += answer["rows"][0].as_py()
    assert rows == 46 and len(list((tmp_path / "shards").iterdir())) == 5
    same(open_run(tmp_path), open_run(alone))


def test_a_unit_that_is_done_twice_is_written_once(tmp_path):
    for name in ("shards", "index.parquet"):
        (tmp_path / name).mkdir()
    for value in (1.0, 2.0):
        entry = Entry("a", {"a:0:raw": torch.full((2,), value)}, [{"id": "a", "key": "a:0:raw"}])
        write_unit(unit_of("x-000000", shards.pack([entry])), str(tmp_path), shards.schema(()))
    (shard,) = (tmp_path / "shards").iterdir()
    before = shard.read_bytes()
    assert np.frombuffer(before[-8:], np.float32).tolist() == [1.0, 1.0]
    shard.unlink()  # the part alone does not make it written
    write_unit(unit_of("x-000000", shards.pack([entry])), str(tmp_path), shards.schema(()))
    assert np.frombuffer(shard.read_bytes()[-8:], np.float32).tolist() == [2.0, 2.0]


def test_what_came_late_from_a_run_before_is_left_out(session_moss, manifest, alone, tmp_path):
    """A machine that was believed dead writes rows that were done again meanwhile."""
    how = {"what": "projected", "dtype": "float32", "workers": 0}
    run = extract(session_moss, manifest, tmp_path / "run", **how)
    for path in list(run.path.rglob("000000.*")):
        path.with_name(f"late-000000{path.suffix}").write_bytes(path.read_bytes())
    assert len(open_run(run.path).index) == 2 * len(run.index)
    same(extract(session_moss, manifest, tmp_path / "run", **how), open_run(alone))


def test_what_a_unit_carries_is_what_was_given():
    assert carried(unit_of("n", [b"\0\0", {"a": 1.5}])) == ("n", [b"\0\0", {"a": 1.5}])


def test_names_of_units_are_a_run_s_own(manifest):
    clips = read_manifest(manifest, shards.COLUMNS)
    first, second = ([name for name, _ in _units(clips, list(range(46)), 20)] for _ in range(2))
    assert len(set(first) | set(second)) == 6


def test_writing_needs_no_torch():
    code = (
        "import sys, audiollm.corpus.units; heavy = {'torch', 'transformers', 'soundfile', 'scipy'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=HERE.parent)


def test_a_cluster_is_joined_or_started(monkeypatch):
    calls = []
    fake = types.SimpleNamespace(is_initialized=lambda: False, init=lambda **how: calls.append(how))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    assert _connect(fake, "auto", 3) and calls[0]["address"] == "auto" and "num_cpus" not in calls[0]
    assert _connect(fake, None, 99) and calls[1]["address"] == "local" and calls[1]["num_cpus"] == 99
    fake.is_initialized = lambda: True
    assert not _connect(fake, "auto", 3), "a cluster that was joined before is left alone"


def test_without_ray(monkeypatch, tiny_moss, manifest, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ArgumentError, match=r"pip install 'audiollm\[ray\]'"):
        extract(tiny_moss, manifest, tmp_path / "run", engine="ray", device="cpu")


def test_weights_are_looked_at_before_ray_starts(monkeypatch, tiny_moss, manifest, tmp_path):
    monkeypatch.setattr("audiollm.corpus.on_ray.run_ray", lambda *a, **k: pytest.fail("Ray was started"))
    shutil.copytree(tiny_moss, tmp_path / "snapshot")
    config = json.loads((tmp_path / "snapshot" / "config.json").read_text())
    config["language_config"]["intermediate_size"] += 8
    (tmp_path / "snapshot" / "config.json").write_text(json.dumps(config))
    with pytest.raises(SnapshotError, match="of another shape"):
        extract(tmp_path / "snapshot", manifest, tmp_path / "run", engine="ray", device="cpu")


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'audiollm[ray]'")
@pytest.mark.skipif(
    not os.environ.get("AUDIOLLM_REAL_RAY"),
    reason="takes two minutes and starts Ray, which busy machines refuse; AUDIOLLM_REAL_RAY=1 runs it",
)
def test_a_real_ray_of_two_workers_survives_the_death_of_one(tiny_moss, manifest, alone, tmp_path):
    command = [sys.executable, str(HERE / "corpus_ray.py"), str(tiny_moss), str(manifest), str(tmp_path)]
    paths = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    run = open_run(tmp_path / "ray")
    same(run, open_run(alone))
    assert told["shot"] and told["shards"] == 15, "the last unit is one row that fails, and has no shard"
    assert told["again"] == 46 and "pool 'none', and 'mean' is asked" in told["refused"]
