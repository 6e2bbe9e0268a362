"""What a kill costs: of the whole run at random moments, and of the processes that prepare ahead."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import corpus_worker
import numpy as np
import pytest

from audiollm import demo
from audiollm.corpus import RunError, ahead, extract, open_run
from audiollm.corpus.ahead import Ahead
from audiollm.corpus.manifest import Row
from audiollm.corpus.preparing import Preparer, unpacked
from audiollm.corpus.worker import serve

HERE = Path(__file__).parent
CLIPS = demo.clips()


def write(path: Path, n: int) -> Path:
    rows = [f"c{k},{CLIPS['long_mix']},{k * 0.7},{k * 0.7 + 1 + k % 3}" for k in range(n)]
    path.write_text("\n".join(["id,audio,start_s,end_s", *rows, "bad,nowhere.wav,,", f"long,{CLIPS['bass']},,"]) + "\n")
    return path


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_kills_at_random_moments_lose_nothing_and_duplicate_nothing(tiny_moss, tmp_path):
    manifest = write(tmp_path / "clips.csv", 30)
    seed = 9
    command = [sys.executable, str(HERE / "corpus_kill.py"), tiny_moss, manifest, tmp_path, "10", str(seed)]
    environment = os.environ | {"PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([str(c) for c in command], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert sum(0 < kill["rows"] < 32 for kill in told["kills"]) >= 1, "none was shot in the middle"
    for kill in told["kills"]:
        assert kill["lost"] == [] and kill["damaged"] == []
    whole, run = open_run(tmp_path / "whole"), open_run(told["out"])
    for one in (whole, run, open_run(tmp_path / "small")):
        assert one.index["id"].to_pylist().count("c3") == 1 and len(one) == len(one.index) == 32
        assert set(one.failures) == {"bad"}
    for clip in (f"c{k}" for k in range(30)):
        np.testing.assert_allclose(run[clip].projected, whole[clip].projected, atol=2e-5, rtol=1e-4)
    # A file may not grow past a limit: the fault is named, and the run goes on where there is room.
    assert "disk_full" in told["limited"] and "make room" in told["limited"]


# Processes that prepare ahead.


def rows_of(*ids: str) -> list[Row]:
    return [Row(clip, (), Path("/")) for clip in ids]


class Idle:
    """A preparer that leaves everything to the processes."""

    prompt = ""
    prepare = None


@pytest.fixture
def quick(monkeypatch):
    """Processes that are up at once, and nothing done in this one."""
    monkeypatch.setattr(ahead, "START_AFTER_S", 0.0)
    monkeypatch.setattr(ahead, "serve", corpus_worker.serve)
    monkeypatch.setattr(ahead, "unpacked", pickle.loads)
    monkeypatch.setattr(Ahead, "_mine", lambda *arguments: None)


def test_a_row_that_kills_its_process_is_found_and_the_others_are_done(quick):
    batches = [rows_of("a", "b"), rows_of("c", "poison", "d"), rows_of("e")]
    with Ahead(2, Idle(), None) as workers:
        results = list(workers.results(iter(batches)))
    done = sorted(clip for result in results if isinstance(result, list) for clip in result)
    failures = [failure for result in results if not isinstance(result, list) for failure in result.failures]
    assert done == ["a", "b", "c", "d", "e"]
    assert [(f.row.id, f.code) for f in failures] == [("poison", "worker_died")]


def test_processes_that_never_come_up_are_an_error(quick, monkeypatch):
    monkeypatch.setattr(ahead, "serve", corpus_worker.stillborn)
    with Ahead(1, Idle(), None) as workers, pytest.raises(RunError, match="__main__") as caught:
        list(workers.results(iter([rows_of("a")])))
    assert caught.value.code == "worker_died"


def test_no_process_is_started_for_little_work(monkeypatch):
    monkeypatch.setattr(ahead, "START_AFTER_S", 0.25)
    started = []
    monkeypatch.setattr(Ahead, "_start", lambda self: started.append(len(done)) or setattr(self, "_depth", 1))
    done = []
    preparer = Idle()
    preparer.prepare = lambda rows: done.append(rows) or time.sleep(0.1)
    with Ahead(1, preparer, None) as workers:
        assert len(list(workers.results(iter([rows_of(str(k)) for k in range(6)])))) == 6
    assert started == [3]


def test_a_run_does_not_wait_for_processes_that_are_starting(quick, monkeypatch):
    monkeypatch.setattr(ahead, "serve", corpus_worker.slow)
    began = time.monotonic()
    with Ahead(1, Idle(), None) as workers:
        workers._start()
    assert time.monotonic() - began < 30 and not multiprocessing.active_children()


def test_no_process_outlives_its_run(quick):
    with Ahead(2, Idle(), None) as workers:
        assert len(list(workers.results(iter([rows_of(str(k)) for k in range(9)])))) == 9
        assert multiprocessing.active_children()
    assert not multiprocessing.active_children()


def test_a_process_ends_with_the_one_that_started_it():
    """A run that was shot leaves nobody behind: the pipe closes."""
    mine, theirs = multiprocessing.Pipe()
    thread = threading.Thread(target=_served, args=(theirs,))
    thread.start()
    assert mine.recv_bytes() == b""
    mine.close()
    thread.join(10)
    assert not thread.is_alive()


def _served(connection) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signal, "signal", lambda *a: None)  # only the main thread of a process may
        patch.setattr(Preparer, "of", classmethod(lambda cls, folder, prompt: Idle()))
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            patch.setenv(name, "1")
        serve(connection, None, "")


def test_a_real_process_is_shot_and_every_row_is_there_once(session_moss, tmp_path, monkeypatch):
    """Its answers are used, it is shot, another takes its place, and the run is the one without processes."""
    manifest = write(tmp_path / "clips.csv", 12)
    how = {"what": "projected", "dtype": "float32", "batch_tokens": 120}
    wanted = extract(session_moss, manifest, tmp_path / "alone", workers=0, **how)
    shot, answers = threading.Event(), []
    really = Preparer.prepare

    def patient(self, rows):
        """This process lends no hand until the other has been shot: it is too quick for the test otherwise."""
        shot.wait(60)
        return really(self, rows)

    def counted(data):
        answers.append(data)
        return unpacked(data)

    def shoot() -> None:
        while not (seen and seen[0]._done.qsize()):
            time.sleep(0.02)
        (process,) = (p for p in multiprocessing.active_children() if p.name == "audiollm-prepare")
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        shot.set()

    started, seen = Ahead._started, []

    def noticed(self):
        seen.append(self)
        return started(self)

    monkeypatch.setattr(ahead, "START_AFTER_S", 0.0)
    monkeypatch.setattr(Ahead, "_started", noticed)
    monkeypatch.setattr(Preparer, "prepare", patient)
    monkeypatch.setattr(ahead, "unpacked", counted)
    thread = threading.Thread(target=shoot, daemon=True)
    thread.start()
    run = extract(session_moss, manifest, tmp_path / "run", workers=1, **how)
    thread.join(5)
    assert shot.is_set() and answers and len(seen) == 2
    assert sorted(run.index["id"].to_pylist()) == sorted(wanted.index["id"].to_pylist())
    for clip in set(wanted) - {"bad"}:
        np.testing.assert_allclose(run[clip].projected, wanted[clip].projected, atol=2e-5, rtol=1e-4)
