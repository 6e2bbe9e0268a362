"""What test_corpus_ray.py runs in a process of its own: a run on a Ray of two workers, one of which is shot.

    python corpus_ray.py SNAPSHOT MANIFEST FOLDER

prints one line of JSON. Ray asks for this machine's address in ways that the tests' guard against networks refuses.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

SNAPSHOT, MANIFEST, FOLDER = (Path(p) for p in sys.argv[1:4])
MARK = f"AUDIOLLM_RAY_TEST={uuid.uuid4().hex}"
os.environ[MARK.split("=")[0]] = MARK.split("=")[1]


CLUSTER = """
import ray
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
print("address", ray.get_runtime_context().gcs_address, flush=True)
input()
"""


def main() -> None:
    # A busy machine is slow to start Ray's own helpers; nothing is reported to anyone.
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_agent_register_timeout_ms": "120000"}
    # This cluster is this test's alone: it has a token of its own.
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex}
    _without_slow_import()
    for _ in range(3):  # Ray gives itself 30 s to start, which a busy machine may miss
        cluster = subprocess.Popen(
            [sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert cluster.stdout is not None
        address = next((line.split()[1] for line in cluster.stdout if line.startswith("address ")), None)
        if address is not None:
            break
        cluster.wait()
    assert address is not None, "Ray does not start here"
    try:
        print(json.dumps(_told(address)))
    finally:
        cluster.communicate("\n", timeout=60)


def _without_slow_import() -> None:
    """Where Jupyter is installed, jsonschema finds rfc3987_syntax, which takes seconds to import in each of Ray's processes.

    Ray gives its helpers 15 s to start; jsonschema does without that module.
    """
    (FOLDER / "light").mkdir()
    (FOLDER / "light" / "rfc3987_syntax.py").write_text("raise ImportError('left out')\n")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(FOLDER / "light"), os.environ.get("PYTHONPATH", "")])


def _told(address: str) -> dict:
    from audiollm.corpus import RunError, extract, on_ray

    on_ray.UNIT_ROWS = 3
    how = {"what": "projected", "dtype": "float32", "device": "cpu", "engine": "ray", "address": address}
    told: dict = {"shot": 0}
    thread = threading.Thread(target=_shoot, args=(told,), daemon=True)
    thread.start()
    run = extract(SNAPSHOT, MANIFEST, FOLDER / "ray", actors=1, **how)
    told["ids"] = run.index["id"].to_pylist()
    told["shards"] = len(list((FOLDER / "ray" / "shards").iterdir()))
    told["again"] = len(extract(SNAPSHOT, MANIFEST, FOLDER / "ray", **how).index)
    try:
        extract(SNAPSHOT, MANIFEST, FOLDER / "ray", pool="mean", **how)
    except RunError as error:
        told["refused"] = str(error)
    return told


def _shoot(told: dict) -> None:
    """Kill the process that holds the model, in the middle of its work."""
    while not told["shot"]:
        time.sleep(0.02)
        for process in Path("/proc").glob("[0-9]*"):
            try:
                name, environment = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
            except OSError:
                continue
            busy = b"ray::MapWorker(MapBatches(_Embed))" in name and b"__init__" not in name
            if busy and MARK.encode() in environment:
                time.sleep(0.3)
                os.kill(int(process.name), signal.SIGKILL)
                told["shot"] = int(process.name)
                return


if __name__ == "__main__":
    main()
