"""What test_corpus_kill.py runs in another process: one that loads the model once and forks runs which are shot.

    python corpus_kill.py SNAPSHOT MANIFEST FOLDER KILLS SEED

prints one line of JSON: for each kill, what the run had reported written and what was whole in the folder afterwards.
"""

from __future__ import annotations

import json
import logging
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path

import torch

from audiollm import load_model
from audiollm.corpus import RunError, extract, open_run

SNAPSHOT, MANIFEST, FOLDER = (Path(p) for p in sys.argv[1:4])
HOW = {"what": "projected", "dtype": "float32", "workers": 0, "batch_tokens": 200, "shard_bytes": 6_000}


def main() -> None:
    torch.set_num_threads(1)
    session = load_model(SNAPSHOT, "cpu", torch.float32)
    rng = random.Random(int(sys.argv[5]))
    began = time.monotonic()
    wait(forked(session, FOLDER / "whole", FOLDER / "whole.log"))
    whole_s = time.monotonic() - began
    kills, out = [], FOLDER / "run0"
    for number in range(int(sys.argv[4])):
        log = FOLDER / f"{number}.log"
        child = forked(session, out, log)
        time.sleep(rng.uniform(0, whole_s))
        os.kill(child, signal.SIGKILL)
        wait(child)
        reported = [line.split()[1].rstrip(":") for line in log.read_text().splitlines() if line.startswith("wrote ")]
        parts = {p.stem for p in (out / "index.parquet").glob("*.parquet")} if (out / "run.json").exists() else set()
        run = open_run(out) if (out / "run.json").exists() else None
        there = len(run) if run else 0
        kills.append(
            {
                "reported": reported,
                "lost": sorted(set(reported) - parts),
                "damaged": run.verify() if run else (),
                "rows": there,
            }
        )
        if there == len(MANIFEST.read_text().splitlines()) - 1:
            out = FOLDER / f"run{number + 1}"
    extract(session, MANIFEST, out, **HOW)
    small = limited(session, FOLDER / "small")
    print(json.dumps({"kills": kills, "out": str(out), "limited": small}))


def forked(session: object, out: Path, log: Path, limit: int | None = None) -> int:
    log.touch()  # the child may be shot before it opens it
    child = os.fork()
    if child:
        return child
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    logging.basicConfig(level=logging.DEBUG, format="%(message)s")
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    status = 1
    try:
        extract(session, MANIFEST, out, **HOW)  # type: ignore[arg-type]
        status = 0
    except RunError as error:
        os.write(2, f"{error.code}: {error}\n".encode())
    finally:
        os._exit(status)


def limited(session: object, out: Path) -> str:
    """What a run says that may write no file above 10,000 bytes, where one row takes more."""
    wait(forked(session, out, FOLDER / "limited.log", limit=10_000))
    extract(session, MANIFEST, out, **HOW)  # type: ignore[arg-type]
    return (FOLDER / "limited.log").read_text()


def wait(child: int) -> None:
    os.waitpid(child, 0)


if __name__ == "__main__":
    main()
