"""How long `load_model` takes and how much memory, beside the least that any loader must do.

The baseline opens the same files with `safe_open` and clones every tensor. Both run on the CPU in the dtype of the
file, which lies in the page cache, each in a fresh process after its imports and after a load of a small snapshot
(lazy imports), taking turns. Limits: time at most 1.6 times the baseline's, peak anonymous memory at most 1.15 times
the model.

    python benchmarks/load.py [--repeats 7] [--threads 2 1] [--keep FOLDER]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TIME_LIMIT, MEMORY_LIMIT = 1.6, 1.15
# Real widths of Music Flamingo, fewer blocks and words: 2.4 GB in bfloat16.
TEXT = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "vocab_size": 16384,
}
AUDIO = {"hidden_size": 1280, "intermediate_size": 5120, "num_attention_heads": 20, "num_hidden_layers": 8}
SAMPLE_S = 0.002


def main() -> int:
    parser = argparse.ArgumentParser(description="Time and memory of load_model against safe_open plus clone.")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, nargs="+", default=[os.cpu_count() or 1, 1])
    parser.add_argument("--keep", type=Path, help="write the snapshot here, or use the one that is here, and keep it")
    parser.add_argument("--worker", choices=("ours", "baseline"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(_measure(args.worker, args.folder, args.threads[0])))
        return 0
    with tempfile.TemporaryDirectory(prefix="audiollm-load-") as temporary:
        folder = args.keep or Path(temporary) / "snapshot"
        size = _snapshot(folder)
        print(f"snapshot: {size / 1e9:.2f} GB in {len(list(folder.glob('*.safetensors')))} file(s), bfloat16")
        good = [_compare(folder, size, threads, args.repeats) for threads in dict.fromkeys(args.threads)]
    print("within the limits" if all(good) else "OVER A LIMIT")
    return 0 if all(good) else 1


def _snapshot(folder: Path) -> int:
    import torch
    from snapshots import write_snapshot

    if not folder.exists():
        return write_snapshot(folder, text=TEXT, audio=AUDIO, dtype=torch.bfloat16)
    return json.loads((folder / "model.safetensors.index.json").read_text())["metadata"]["total_size"]


def _compare(folder: Path, size: int, threads: int, repeats: int) -> bool:
    _read_once(folder)
    runs: dict[str, list[dict]] = {"baseline": [], "ours": []}
    for _ in range(repeats):
        for who, found in runs.items():
            found.append(_run(who, folder, threads))
    seconds = {who: [run["seconds"] for run in found] for who, found in runs.items()}
    peak = {who: max(run["peak_bytes"] for run in found) for who, found in runs.items()}
    middle = {who: statistics.median(values) for who, values in seconds.items()}
    ratio = middle["ours"] / middle["baseline"]
    memory = peak["ours"] / size
    pairs = [ours / base for ours, base in zip(seconds["ours"], seconds["baseline"], strict=True)]
    print(f"\n{threads} thread(s), {repeats} turns")
    for who, values in seconds.items():
        print(
            f"  {who:9s} median {middle[who]:.3f} s, least {min(values):.3f} s, most {max(values):.3f} s; "
            f"peak anonymous memory {peak[who] / 1e9:.3f} GB = {peak[who] / size:.3f} x the model"
        )
    print(f"  time ratio {ratio:.2f} of medians, {min(seconds['ours']) / min(seconds['baseline']):.2f} of the least, ")
    print(f"    {min(pairs):.2f}-{max(pairs):.2f} turn by turn (limit {TIME_LIMIT})")
    print(f"  memory ratio {memory:.3f} (limit {MEMORY_LIMIT})")
    return ratio <= TIME_LIMIT and memory <= MEMORY_LIMIT


def _read_once(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass


def _run(who: str, folder: Path, threads: int) -> dict:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, "--worker", who, "--folder", str(folder), "--threads", str(threads)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _measure(who: str, folder: Path, threads: int) -> dict:
    """Seconds and peak anonymous bytes, above what was there before, of one load in this process."""
    import torch

    from audiollm import demo

    torch.set_num_threads(threads)
    load = _ours if who == "ours" else _baseline
    load(demo.snapshot())
    gc.collect()
    with _Peak() as peak:
        start = time.perf_counter()
        loaded = load(folder)
        seconds = time.perf_counter() - start
    del loaded
    return {"seconds": seconds, "peak_bytes": peak.bytes}


def _ours(folder: Path) -> object:
    import torch

    from audiollm import load_model

    return load_model(folder, "cpu", torch.bfloat16)


def _baseline(folder: Path) -> object:
    from safetensors import safe_open

    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 - the file is no mapping
                tensors[name] = file.get_tensor(name).clone()
    return tensors


class _Peak:
    """The most anonymous memory of this process while the block runs, above what it had at the start."""

    def __init__(self, now: Callable[[], int] | None = None) -> None:
        self._now = now or anonymous_bytes
        self._stop = threading.Event()
        self.bytes = 0

    def __enter__(self) -> _Peak:
        self._before = self._now()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._look()
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self._look()

    def _look(self) -> None:
        self.bytes = max(self.bytes, self._now() - self._before)


def anonymous_bytes() -> int:
    """Anonymous resident memory of this process (RssAnon, Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon; this benchmark needs Linux")


if __name__ == "__main__":
    sys.exit(main())
