"""What looking inside costs: capturing a layer beside a plain forward, and attention rows over 30,000 audio tokens.

    python benchmarks/looking.py [--repeats 9] [--threads 1]

Capture: one model of 12 blocks, 36 s of audio (900 audio tokens), float32 on the CPU; a forward with an observed
layer takes turns with the same forward alone. It must take less than 1.05 of its time, the forward at least 200 ms, and
keep the chosen rows alone. Attention: one layer at Music Flamingo's real width (28 heads of 128, 4 key groups), made up
queries and keys of 30,200 positions in bfloat16; the weights of one query row must need less than 2 GB beyond them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from extract import _Turns
from load import ROOT
from snapshots import write_snapshot

from audiollm import Request, Session, demo, load_model
from audiollm.analysis.attention import attention_over_time, row_weights
from audiollm.analysis.lens import logit_lens

TIME_LIMIT, LEAST_S, MEMORY_LIMIT = 1.05, 0.2, 2e9
POSITIONS, HEADS, GROUPS, HEAD_DIM = 30_200, 28, 4, 128


def main() -> int:
    parser = argparse.ArgumentParser(description="Time and memory of looking inside.")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1, help="one is the least disturbed by other work")
    parser.add_argument("--rows-only", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.rows_only:
        print(json.dumps(_row_memory()))
        return 0
    with tempfile.TemporaryDirectory(prefix="audiollm-looking-") as temporary:
        folder = Path(temporary) / "snapshot"
        text = {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_attention_heads": 12,
            "num_key_value_heads": 12,
            "num_hidden_layers": 12,
        }
        write_snapshot(folder, text=text, audio={"num_hidden_layers": 1}, dtype=torch.float32)
        good = _capture(load_model(folder, "cpu", torch.float32), args.repeats)
    done = subprocess.run(
        [sys.executable, __file__, "--rows-only"], stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT
    )
    found = json.loads(done.stdout.splitlines()[-1])
    print(
        f"attention of one row over {POSITIONS:,} positions, {HEADS} heads of {HEAD_DIM}: peak {found['peak'] / 1e9:.3f} GB "
        f"beyond queries and keys (limit {MEMORY_LIMIT / 1e9:g}), {found['seconds']:.2f} s"
    )
    good &= found["peak"] < MEMORY_LIMIT
    print("within the limits" if good else "OVER A LIMIT")
    return 0 if good else 1


def _capture(session: Session, repeats: int) -> bool:
    batch = session.prepare([Request("Describe this.", [demo.clips()["long_mix"]])])

    def observed() -> object:
        with session.observe("resid[6]", tokens="audio") as seen:
            session.forward(batch)
        return seen

    turns = _Turns(lambda: session.forward(batch), observed)
    turns.take(repeats)
    kept = observed()
    rows = sum(len(slot.token_positions) for slot in batch.slots)
    exact = kept.result().nbytes == rows * 768 * 4 == kept.nbytes(batch)
    print(
        f"forward {turns.medians[0]:.3f} s, with one layer's audio rows observed {turns.medians[1]:.3f} s: ratio "
        f"{turns.ratio:.3f} (limit {TIME_LIMIT}), turn by turn {min(turns.pairs):.3f}-{max(turns.pairs):.3f}; keeps "
        f"{kept.result().nbytes:,} bytes, the rows alone: {exact}"
    )
    for name, call in (
        ("logit lens of 13 layers", lambda: logit_lens(session, batch)),
        ("attention over time of 12 blocks", lambda: attention_over_time(session, batch)),
    ):
        call()
        start = time.perf_counter()
        call()
        print(f"{name}: {(time.perf_counter() - start) / turns.medians[0]:.2f} of a forward")
    return turns.ratio < TIME_LIMIT and turns.medians[0] >= LEAST_S and exact


def _row_memory() -> dict:
    generator = torch.Generator().manual_seed(0)
    query, key, cos, sin = (
        torch.randn(shape, generator=generator).to(torch.bfloat16)
        for shape in ((POSITIONS, HEADS, HEAD_DIM), (POSITIONS, GROUPS, HEAD_DIM), *[(POSITIONS, HEAD_DIM)] * 2)
    )
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    start = time.perf_counter()
    weights = row_weights(query, key, cos, sin, [POSITIONS - 1])
    seconds = time.perf_counter() - start
    assert torch.allclose(weights.sum(-1), torch.ones(()), atol=1e-4)
    return {"peak": _resident("VmHWM") - before, "seconds": seconds}


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


if __name__ == "__main__":
    sys.exit(main())
