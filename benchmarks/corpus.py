"""What `audiollm.corpus.extract` costs beside the model alone, and beside a simple loop over single requests.

Clips are cut from the embedded demo clips, models are the embedded ones in float32 on the CPU: with so small models,
decoding and mel weigh as much as the model, which is the hard case. Every measurement is a process of its own.

1. 500 clips of mixed lengths in one run: wall time against max(time in the model, CPU seconds of all processes / cores).
2. Short (1-3 s), long (30 s) and mixed clips: wall time of the loop against that of the run, which also writes what it
   finds; and how far the run's numbers are from the loop's.
3. 50, 100, 200 and 500 clips: time, and peak memory of the main process and of the largest that prepares.
4. What 1,000,000 clips of 30 s would take, worked out from sizes and measured rates.

    python benchmarks/corpus.py [--clips 500] [--mix-clips 100] [--families moss_music music_flamingo] [--threads 1]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch

from audiollm import Session, demo
from audiollm.corpus import Run, extract
from audiollm.corpus.clip import hear
from audiollm.corpus.manifest import read_manifest

BOUND, LOOP, MOSS_SHORT, FARTHEST = 1.15, 1.0, 1.3, 2e-5
LAYERS = (0, 2, -1)
# Small shards: at most two are in memory, and memory is to show what grows beside them.
HOW = {"what": ("projected", "contextual"), "layers": LAYERS, "dtype": "float32", "shard_bytes": 8 << 20}
# Width and audio tokens of 30 s of the published models.
PUBLISHED = {"music_flamingo": (3584, 750), "moss_music": (4096, 375)}


def main() -> int:
    parser = argparse.ArgumentParser(description="Time, memory and exactness of a corpus run.")
    parser.add_argument("--clips", type=int, default=500)
    parser.add_argument("--mix-clips", type=int, default=100)
    parser.add_argument("--families", nargs="+", default=["moss_music", "music_flamingo"], choices=demo.SNAPSHOTS)
    parser.add_argument("--threads", type=int, default=1, help="of the model; one process prepares beside it")
    parser.add_argument("--one", nargs=4, metavar=("FAMILY", "MIX", "CLIPS", "LOOP"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        family, mix, clips, with_loop = args.one
        print(json.dumps(_one(family, mix, int(clips), with_loop == "loop", args.threads)))
        return 0
    print(
        f"{_cores()} cores, load {os.getloadavg()[0]:.2f} before the first measurement, {args.threads} model thread(s)"
    )
    good, rates = True, {}
    for family in args.families:
        whole = _measured(family, "mixed", args.clips, False, args.threads)
        good &= _bound(family, args, whole)
        good &= _mixes(family, args, rates)
        good &= _growth(family, args, whole)
    _million(rates)
    print("within the limits" if good else "OVER A LIMIT")
    return 0 if good else 1


def _bound(family: str, args: argparse.Namespace, found: dict) -> bool:
    floor = max(found["model_s"], found["cpu_s"] / _cores())
    ratio = found["wall_s"] / floor
    print(
        f"{family}: {args.clips} mixed clips in {found['wall_s']:.1f} s; model {found['model_s']:.1f} s, all CPU seconds / cores "
        f"{found['cpu_s'] / _cores():.1f} s: ratio {ratio:.3f} (limit {BOUND}), load {found['load']:.1f}"
    )
    return ratio <= BOUND


def _mixes(family: str, args: argparse.Namespace, rates: dict[str, float]) -> bool:
    good = True
    print(f"{family}: {args.mix_clips} clips, a loop over single requests beside a run")
    print(
        f"  {'mix':<6} {'loop':>8} {'run':>8} {'ratio':>6} {'limit':>6} {'CPU loop':>8} {'run':>8} {'rel. rms':>8} {'load':>5}"
    )
    for mix in ("short", "long", "mixed"):
        limit = MOSS_SHORT if (family, mix) == ("moss_music", "short") else LOOP
        found = _measured(family, mix, args.mix_clips, True, args.threads)
        ratio = found["loop_s"] / found["wall_s"]
        print(
            f"  {mix:<6} {found['loop_s']:6.2f} s {found['wall_s']:6.2f} s {ratio:6.2f} {limit:6.2f} "
            f"{found['loop_cpu_s']:6.2f} s {found['cpu_s']:6.2f} s {found['farthest']:8.1e} {found['load']:5.1f}"
        )
        good &= ratio >= limit and found["farthest"] <= FARTHEST
        if mix == "long":
            rates[family] = args.mix_clips / found["wall_s"]
    return good


def _growth(family: str, args: argparse.Namespace, whole: dict) -> bool:
    print(f"{family}: how cost grows\n  {'clips':>6} {'time':>9} {'main':>9} {'preparing':>10}")
    peaks = []
    for clips in (50, 100, 200, args.clips):
        found = whole if clips == args.clips else _measured(family, "mixed", clips, False, args.threads)
        peaks.append(found["main_mib"])
        helper = f"{found['worker_mib']:6.0f} MiB" if found["worker_mib"] else "none"
        print(f"  {clips:6d} {found['wall_s']:7.1f} s {found['main_mib']:5.0f} MiB {helper:>10}")
    return peaks[-1] <= 1.3 * peaks[0]


def _million(rates: dict[str, float]) -> None:
    print("1,000,000 clips of 30 s, one layer in bfloat16, shards of 256 MiB:")
    for family, (width, tokens) in PUBLISHED.items():
        for pool, rows in (("none", tokens), ("segments:5", 6), ("mean", 1)):
            nbytes = 1_000_000 * (rows * width * 2 + rows * 16)
            print(f"  {family:<15} {pool:<11} {nbytes / 1e12:8.3f} TB in {max(1, nbytes // (256 << 20)):7,} shards")
    for family, rate in rates.items():
        print(f"  {family}: {rate:.1f} clips/s with the embedded model here, {1e6 / rate / 3600:.1f} h for a million")


def _measured(family: str, mix: str, clips: int, with_loop: bool, threads: int) -> dict:
    command = [
        sys.executable,
        __file__,
        "--threads",
        str(threads),
        "--one",
        family,
        mix,
        str(clips),
        "loop" if with_loop else "run",
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _one(family: str, mix: str, clips: int, with_loop: bool, threads: int) -> dict:
    torch.set_num_threads(threads)
    session = demo.load(family)
    with tempfile.TemporaryDirectory(prefix="audiollm-corpus-") as temporary:
        manifest = _manifest(Path(temporary) / "clips.csv", mix, clips)
        _loop(session, manifest, 3)
        told: dict = {"load": os.getloadavg()[0]}
        wanted = None
        if with_loop:
            began, cpu = time.perf_counter(), _cpu_s()
            wanted = _loop(session, manifest, clips)
            told |= {"loop_s": time.perf_counter() - began, "loop_cpu_s": _cpu_s() - cpu}
        model, peaks = _ModelTime(), _Peaks()
        began, cpu = time.perf_counter(), _cpu_s()
        run = extract(session, manifest, Path(temporary) / "run", **HOW)
        told |= {"wall_s": time.perf_counter() - began, "cpu_s": _cpu_s() - cpu, "model_s": model.seconds}
        told |= {"main_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "worker_mib": peaks.stop()}
        assert len(run) == clips and not run.failures
        if wanted is not None:
            told["farthest"] = _farthest(run, wanted)
        return told


def _manifest(path: Path, mix: str, clips: int) -> Path:
    rng, files, lines = random.Random(7), demo.clips(), ["id,audio,start_s,end_s"]
    for number in range(clips):
        short, long = rng.uniform(1, 3), 30.0
        length = {"short": short, "long": long, "mixed": rng.choice([short, rng.uniform(4, 12), long])}[mix]
        name = "long_mix" if length > 12 else rng.choice([n for n in demo.CLIPS if n != "long_mix"])
        start = rng.uniform(0, (36 if name == "long_mix" else 12) - length)
        lines.append(f"c{number},{files[name]},{start:.4f},{start + length:.4f}")
    path.write_text("\n".join(lines) + "\n")
    return path


def _loop(session: Session, manifest: Path, clips: int) -> dict[str, tuple]:
    """What a user would write: one request after the other, nothing saved."""
    found = {}
    rate, longest = session._adapter.clock.sample_rate, session._adapter.max_s
    for row in read_manifest(manifest).rows(range(clips)):
        _, request = hear(row, "", rate, longest)
        batch = session.prepare([request])
        audio = session.extract_audio_embeddings(batch)[0].projected
        found[row.id] = (audio, session.extract_contextual_embeddings(batch, LAYERS)[0])
    return found


def _farthest(run: Run, wanted: dict[str, tuple]) -> float:
    """The largest relative rms between the run's tensors and the loop's."""
    worst = 0.0
    for clip, (audio, states) in wanted.items():
        found = run[clip]
        for mine, its in ((found.projected, audio), *((found.contextual[k], states[k]) for k in LAYERS)):
            worst = max(worst, float(((mine - its).square().mean() / its.square().mean()).sqrt()))
    return worst


class _ModelTime:
    """Seconds spent in the two calls that run the model."""

    def __init__(self) -> None:
        self.seconds = 0.0
        for name in ("extract_audio_embeddings", "extract_contextual_embeddings"):
            setattr(Session, name, self._timed(getattr(Session, name)))

    def _timed(self, call):
        def timed(*arguments, **named):
            began = time.perf_counter()
            result = call(*arguments, **named)
            self.seconds += time.perf_counter() - began
            return result

        return timed


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return float(np.sum([u.ru_utime + u.ru_stime for u in used]))


class _Peaks(threading.Thread):
    """The largest resident size that any process preparing audio had, as the kernel counts it."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._mib, self._ended = 0.0, threading.Event()
        self.start()

    def run(self) -> None:
        while not self._ended.wait(0.2):
            for process in multiprocessing.active_children():
                try:
                    status = Path(f"/proc/{process.pid}/status").read_text()
                except OSError:
                    continue
                peak = next((line for line in status.splitlines() if line.startswith("VmHWM")), "VmHWM: 0 kB")
                self._mib = max(self._mib, int(peak.split()[1]) / 1024)

    def stop(self) -> float:
        """In MiB; 0 where there was none."""
        self._ended.set()
        self.join()
        return self._mib


def _cores() -> int:
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    raise SystemExit(main())
