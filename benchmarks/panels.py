"""What the panels take: a slider to its new picture, and a long source to its timeline.

    python benchmarks/panels.py [--repeats 9] [--threads 1]

Slider: on the embedded model and two clips, the seconds from setting a control of LayerPanel to the new picture, the median
of several layers, for each view; it must be under 0.3 s. The first picture, which runs the model, is printed beside.
Timeline: a source of 10 minutes; after it is prepared TimelinePanel must open in under 2 s and send less than 40 MB, which
are counted from the messages to the browser: the JSON of every one with its buffers. CPU seconds are printed as well, for
on a machine that others use the clock on the wall says more about them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import comm
import numpy as np
import torch
from audiollm.widgets import LayerPanel, TimelinePanel
from audiollm.widgets.layer_views import VIEWS

from audiollm import Request, Waveform, demo

PICTURE_LIMIT_S, OPEN_LIMIT_S, SENT_LIMIT = 0.3, 2.0, 40e6
MINUTES = 10


def main() -> int:
    parser = argparse.ArgumentParser(description="Time and bytes of the panels.")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1, help="one is the least disturbed by other work")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    good = True
    for family in demo.SNAPSHOTS:
        good &= _slider(family, args.repeats)
    good &= _timeline(args.repeats)
    print("within the limits" if good else "OVER A LIMIT")
    return 0 if good else 1


def _slider(family: str, repeats: int) -> bool:
    """Each view's median, from a control to the picture."""
    session, clips = demo.load(family), demo.clips()
    batch = session.prepare([Request("Compare.", [clips["mix"], clips["bass"]])])
    wall, _, panel = _timed(lambda: LayerPanel(session, batch).wait())
    print(f"{family}: first picture, with the model's prefill, {wall:.3f} s")
    n, good = session.n_layers + 1, True
    for view in VIEWS:
        panel.view.value, panel.layers.value = view, tuple(range(n))
        panel.wait()
        walls, cpus = [], []
        for k in range(1, repeats + 1):
            before = panel.figure.png

            seconds, cpu, _ = _timed(partial(_change, panel, k, n))
            assert panel.failure is None and panel.figure.png != before, "no new picture"
            walls.append(seconds)
            cpus.append(cpu)
        median = statistics.median(walls)
        good &= median < PICTURE_LIMIT_S
        print(
            f"{family}, {VIEWS[view]}: {median:.3f} s to the new picture (limit {PICTURE_LIMIT_S:g}), "
            f"{min(walls):.3f}-{max(walls):.3f}; {statistics.median(cpus):.3f} s of CPU"
        )
    panel.close()
    return good


def _change(panel: LayerPanel, k: int, n: int) -> None:
    """The k-th other choice of layers, until it is shown."""
    if panel.view.value in ("norms", "map"):
        panel.layers.value = tuple(range(k % (n - 1), n))
    else:
        panel.layer.value = (panel.layer.value + 1) % n
    panel.wait()


def _timeline(repeats: int) -> bool:
    samples = np.random.default_rng(0).normal(0, 0.1, 16_000 * 60 * MINUTES).astype(np.float32)
    batch = demo.load("music_flamingo").prepare([Request("What is it?", [Waveform(samples, 16_000)])])
    walls, cpus, counts = [], [], []
    for _ in range(repeats):
        with _counted() as sent:  # what it opens with
            wall, cpu, panel = _timed(lambda: TimelinePanel(batch))
        walls.append(wall)
        cpus.append(cpu)
        counts.append(sent[0])
        panel.close()
    median = statistics.median(walls)
    print(
        f"timeline of {MINUTES} minutes: open in {median:.3f} s (limit {OPEN_LIMIT_S:g}), {min(walls):.3f}-{max(walls):.3f}; "
        f"{statistics.median(cpus):.3f} s of CPU; {max(counts) / 1e6:.3f} MB sent to the browser (limit {SENT_LIMIT / 1e6:g})"
    )
    return median < OPEN_LIMIT_S and max(counts) < SENT_LIMIT


def _timed(act: Callable[[], Any]) -> tuple[float, float, Any]:
    """Seconds on the wall, seconds of CPU, and the result."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = act()
    return time.perf_counter() - wall, time.process_time() - cpu, result


@contextmanager
def _counted() -> Iterator[list[int]]:
    """Bytes of all messages to the browser while this is open."""
    sent = [0]

    class Counting(comm.base_comm.BaseComm):
        def publish_msg(
            self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **keys: Any
        ) -> None:
            told = json.dumps([msg_type, data, metadata, keys], default=str)
            sent[0] += len(told) + sum(memoryview(buffer).nbytes for buffer in buffers or ())

    before = comm.create_comm
    comm.create_comm = Counting
    try:
        yield sent
    finally:
        comm.create_comm = before


if __name__ == "__main__":
    sys.exit(main())
