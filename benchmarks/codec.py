"""The codec at full size: time, memory and exactness against baselines measured in the same run.

    python benchmarks/codec.py                              # 5, 10 s: ours, GEMM floor, dense reference
    python benchmarks/codec.py --seconds 5 10 30 --loom --stream 25 --long

Weights are random, 1.06 G parameters in memory (4.2 GiB); nothing is read. Per length, rounds of
{floor, ours, dense, loom} are interleaved, so that what else the machine does hits them alike, and ratios are medians
over rounds. The floor is the time that the matrix products of a decode alone take here, at the same shapes and in the same
row blocks, plus the attention's at the same rate. Every ratio is given for wall
and for processor time: on a busy machine only the latter means something, and with `--threads 1` it hardly notices
the neighbours. "dense" attends with a whole [T, T] mask, as the published code does.
Memory is the peak resident size of a phase minus what was resident after loading (Linux).
`--loom` writes the same weights as a 4.3 GB GGUF into `--folder` and decodes it with loom-py-rt in a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from audiollm.vendor.moss_audio_tokenizer import DecoderWeights, StageWeights, build_decoder, dequantize, parse_config
from audiollm.vendor.moss_audio_tokenizer.codec import ROWS_PER_STEP, patch_up
from audiollm.vendor.moss_audio_tokenizer.stage import FEED_FORWARD_ROWS, _rotate, _rotation
from torch.nn import functional

from audiollm.codec.contract import snapshot_metadata
from audiollm.codec.model import Model

HERE = Path(__file__).resolve().parent
CONFIG = HERE.parent / "tests" / "data" / "codec" / "v2_config_full.json"


def random_decoder(scale: float) -> DecoderWeights:
    """Full-size random weights; `scale` < 1 shrinks the number of layers, to try the script."""
    raw = json.loads(CONFIG.read_text())
    for module in raw["decoder_kwargs"]:
        if "num_layers" in module:
            module["num_layers"] = max(1, round(module["num_layers"] * scale))
    del raw["encoder_kwargs"]
    generator = torch.Generator().manual_seed(0)

    def get(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        noise = torch.empty(shape).uniform_(-1.7, 1.7, generator=generator)
        if name.endswith((".scale", "original0")):
            return 0.2 + 0.05 * noise if name.endswith(".scale") else 1 + 0.1 * noise.abs()
        if "norm" in name:
            return (1 if name.endswith("weight") else 0) + 0.1 * noise
        return 0.02 * noise if name.endswith("bias") else noise / math.sqrt(shape[1])

    return build_decoder(get, parse_config(raw), lambda tensor: tensor)


def random_codes(frames: int) -> np.ndarray:
    return np.random.default_rng(frames).integers(0, 1024, (frames, 32))


def work(weights: DecoderWeights, frames: int) -> tuple[float, float]:
    """(linear, attention) floating point operations of a decode."""
    linear, attention, rows = 0.0, 0.0, float(frames)
    for stage in weights.stages:
        c = stage.config
        linear += (
            2 * rows * (c.layers * (4 * c.d_model**2 + 2 * c.d_model * c.ff) + c.d_model * (c.input_dim + c.output_dim))
        )
        seen = rows * c.context - c.context * (c.context - 1) / 2 if rows >= c.context else rows * (rows + 1) / 2
        attention += 4 * seen * c.d_model * c.layers
        rows *= c.patch
    return linear, attention


@torch.inference_mode()
def floor_seconds(weights: DecoderWeights, frames: int) -> np.ndarray:
    """(wall, cpu) of the matrix products alone: each size of row block once through all layers, scaled to their number."""
    total, rows = np.zeros(2), frames
    for stage in weights.stages:
        sizes: dict[int, int] = {}
        for start in range(0, rows, ROWS_PER_STEP):
            step = min(ROWS_PER_STEP, rows - start)
            for at in range(0, step, FEED_FORWARD_ROWS):
                size = min(FEED_FORWARD_ROWS, step - at)
                sizes[size] = sizes.get(size, 0) + 1
        for size, count in sizes.items():
            total += count * products_seconds(stage, size)
        rows *= stage.config.patch
    linear, attention = work(weights, frames)
    return total * (linear + attention) / linear


def products_seconds(stage: StageWeights, rows: int) -> np.ndarray:
    c = stage.config
    x, out, hidden = (torch.full((rows, width), 0.1) for width in (c.d_model, c.d_model, c.ff))
    entering, leaving = torch.full((rows, c.input_dim), 0.1), torch.empty(rows, c.output_dim)
    qkv = torch.empty(rows, 3 * c.d_model)
    started = np.array([time.perf_counter(), time.process_time()])
    torch.mm(entering, stage.input_proj.t(), out=out)
    for layer in stage.layers:
        torch.mm(x, layer.qkv.t(), out=qkv)
        torch.mm(x, layer.out.t(), out=out)
        torch.mm(x, layer.up.t(), out=hidden)
        torch.mm(hidden, layer.down.t(), out=out)
    torch.mm(x, stage.output_proj.t(), out=leaving)
    return np.array([time.perf_counter(), time.process_time()]) - started


@torch.inference_mode()
def dense_decode(weights: DecoderWeights, codes: np.ndarray) -> np.ndarray:
    """The decode as published: whole clip, one [T, T] mask a stage, plain modules."""
    x = dequantize(weights.quantizer, torch.from_numpy(codes))
    for stage in weights.stages:
        c = stage.config
        x = functional.linear(x, stage.input_proj)
        count = len(x)
        back = torch.arange(count)[:, None] - torch.arange(count)[None]
        mask = (back >= 0) & (back < c.context)
        rotation = _rotation(c, 0, count, x)
        for layer in stage.layers:
            normed = functional.layer_norm(x, (c.d_model,), layer.norm1_weight, layer.norm1_bias, 1e-5)
            q, k, v = (part.contiguous() for part in functional.linear(normed, layer.qkv).chunk(3, dim=1))
            _rotate(q, rotation, c.heads)
            _rotate(k, rotation, c.heads)
            q, k, v = (part.view(1, count, c.heads, c.head_dim).transpose(1, 2) for part in (q, k, v))
            mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = x + functional.linear(mixed.transpose(1, 2).reshape(count, c.d_model), layer.out)
            normed = functional.layer_norm(x, (c.d_model,), layer.norm2_weight, layer.norm2_bias, 1e-5)
            x = x + functional.linear(functional.gelu(functional.linear(normed, layer.up)), layer.down)
        x = patch_up(functional.linear(x, stage.output_proj), c.patch)
    return x.reshape(-1).numpy()


class Loom:
    """loom-py-rt on the same weights, in a process of its own, decoding when asked."""

    def __init__(self, weights: DecoderWeights, folder: Path, threads: int) -> None:
        from codec_loom import write_gguf

        self.path = folder / "bench_codec.gguf"
        if not self.path.exists():
            write_gguf(weights, self.path)
        env = {**os.environ, "LOOM_N_THREADS": str(threads), "PYTHONPATH": str(HERE.parent)}
        command = [sys.executable, str(HERE / "codec_loom.py"), "worker", str(self.path)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self._folder, self.loaded = folder, self._answer()["ready"]

    def _answer(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the loom process ended with {self._process.wait()}")
        return json.loads(line)

    def decode(self, codes: np.ndarray, keep: bool) -> dict:
        at, out = self._folder / "bench_codes.npy", self._folder / "bench_loom.npy"
        np.save(at, codes)
        self._process.stdin.write(json.dumps({"codes": str(at), "out": str(out) if keep else ""}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        if keep:
            answer["samples"] = np.load(out)
        return answer

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def memory(key: str) -> float:
    """VmRSS or VmHWM of this process in GiB; nan where there is no /proc."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return math.nan
    return next(int(line.split()[1]) / 2**20 for line in lines if line.startswith(key))


def measured(call: Callable[[], object]) -> tuple[float, float, float, object]:
    """(wall s, cpu s, peak resident GiB during the call, its value)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    cpu, started = time.process_time(), time.perf_counter()
    value = call()
    return time.perf_counter() - started, time.process_time() - cpu, memory("VmHWM"), value


def relative_rms(ours: np.ndarray, theirs: np.ndarray) -> float:
    difference, scale = 0.0, 0.0
    for start in range(0, len(ours), 1 << 20):
        a, b = (np.float64(x[start : start + (1 << 20)]) for x in (ours, theirs))
        difference, scale = difference + float(np.square(a - b).sum()), scale + float(np.square(b).sum())
    return math.sqrt(difference / scale)


def compare(model: Model, base: float, seconds: float, args: argparse.Namespace, loom: Loom | None) -> None:
    frames = round(seconds * model.config.frame_rate)
    codes = random_codes(frames)
    rounds: dict[str, list[tuple[float, float, float]]] = {}
    kept: dict[str, np.ndarray] = {}

    def told(number: int, name: str, wall: float, cpu: float, peak: float) -> None:
        rounds.setdefault(name, []).append((wall, cpu, peak))
        print(
            f"  round {number} {name:6s} {wall:7.2f} s wall {cpu:7.2f} s cpu, load {os.getloadavg()[0]:.1f}", flush=True
        )

    for number in range(args.rounds):
        floor = floor_seconds(model.decoder, frames)
        wall, cpu, peak, audio = measured(lambda: model.codes2speech.infer(codes, progress=False))
        told(number, "ours", wall, cpu, peak - base)
        kept["ours"] = audio.samples
        floor = (floor + floor_seconds(model.decoder, frames)) / 2
        told(number, "floor", floor[0], floor[1], 0.0)
        if args.dense and seconds <= args.dense:
            wall, cpu, peak, kept["dense"] = measured(lambda: dense_decode(model.decoder, codes))
            told(number, "dense", wall, cpu, peak - base)
        if loom is not None:
            answer = loom.decode(codes, keep=number == 0)
            told(number, "loom", answer["wall"], answer["cpu"], answer["peak"] - loom.loaded)
            kept.setdefault("loom", answer.get("samples"))
    linear, attention = work(model.decoder, frames)
    print(
        f"{seconds:g} s of audio, {frames} frames: {(linear + attention) / 1e9:.0f} GFLOP ({linear / 1e9:.0f} linear)"
    )
    for name, values in rounds.items():
        wall, cpu, peak = (statistics.median(column) for column in zip(*values, strict=True))
        by_wall, by_cpu = (
            statistics.median(ours[i] / other[i] for ours, other in zip(rounds["ours"], values, strict=True))
            for i in (0, 1)
        )
        line = f"  {name:6s} {wall:7.2f} s wall, {cpu:7.2f} s cpu, {wall / seconds:.2f} of real time"
        if name == "floor":
            line += f", {(linear + attention) / wall / 1e9:.0f} GFLOP/s"
        else:
            line += f", peak +{peak:.2f} GiB"
        if name != "ours":
            line += f"; ours / {name} {by_wall:.2f} (wall) {by_cpu:.2f} (cpu)"
        if name in ("dense", "loom"):
            line += f", relative rms {relative_rms(kept['ours'], kept[name]):.1e}"
        print(line, flush=True)


def stream(model: Model, base: float, chunk: int, seconds: float) -> None:
    codes = random_codes(round(seconds * model.config.frame_rate))
    live = model.codes2speech.live()
    waits: list[float] = []

    def run() -> np.ndarray:
        pieces = []
        for start in range(0, len(codes), chunk):
            begun = time.perf_counter()
            pieces.append(live.push(codes[start : start + chunk]).samples)
            waits.append((time.perf_counter() - begun) / (min(chunk, len(codes) - start) / model.config.frame_rate))
        return np.concatenate(pieces)

    wall, _, peak, samples = measured(run)
    whole = model.codes2speech.infer(codes, progress=False).samples
    print(
        f"live by {chunk} frames, {seconds:g} s: {wall:.2f} s, {wall / seconds:.2f} of real time (slowest push "
        f"{max(waits):.2f}, {floor_seconds(model.decoder, len(codes))[0] / seconds:.2f} is the floor of a whole decode), "
        f"peak +{peak - base:.2f} GiB, windows {live.nbytes / 1e6:.0f} MB, relative rms to the whole "
        f"{relative_rms(samples, whole):.1e}",
        flush=True,
    )


def long(model: Model, base: float, frames: int) -> None:
    """Time per second of audio and peak memory at `frames`, against 375 frames before and after it."""

    def per_second(count: int) -> tuple[float, float, float]:
        wall, cpu, peak, _ = measured(lambda: model.codes2speech.infer(random_codes(count), progress=False))
        seconds = count / model.config.frame_rate
        print(f"  {count} frames: {wall:.1f} s wall {cpu:.1f} s cpu, load {os.getloadavg()[0]:.1f}", flush=True)
        return wall / seconds, cpu / seconds, peak - base

    short, whole, again = per_second(375), per_second(frames), per_second(375)
    wall, cpu = ((short[i] + again[i]) / 2 for i in (0, 1))
    print(
        f"{frames} frames ({frames / model.config.frame_rate:.0f} s): {whole[0]:.3f} of real time, peak +{whole[2]:.2f} GiB; "
        f"per second of audio {whole[0] / wall:.2f} x (wall) {whole[1] / cpu:.2f} x (cpu) of 375 frames",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, nargs="*", default=[5, 10])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dense", type=float, default=10, help="longest length for the dense reference, 0 for none")
    parser.add_argument("--loom", action="store_true")
    parser.add_argument("--folder", type=Path, default=None, help="where the GGUF goes; kept if it is named")
    parser.add_argument("--stream", type=int, default=0, metavar="FRAMES", help="also live, by so many frames")
    parser.add_argument("--long", type=int, nargs="?", const=4096, default=0, metavar="FRAMES")
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the layers, to try this script")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    weights = random_decoder(args.scale)
    model = Model(Path("random"), snapshot_metadata(weights.config), weights, weights.config.codebook_size)
    base = memory("VmRSS")
    print(f"{sum(t.numel() for t in tensors(weights)) / 1e9:.3f} G parameters, {base:.2f} GiB, {args.threads} threads")
    model.codes2speech.infer(random_codes(25), progress=False)
    with tempfile.TemporaryDirectory() as temporary:
        loom = Loom(weights, args.folder or Path(temporary), args.threads) if args.loom else None
        base = min(base, memory("VmRSS"))
        for seconds in args.seconds:
            compare(model, base, seconds, args, loom)
        if loom is not None:
            loom.close()
    if args.stream:
        stream(model, base, args.stream, max(args.seconds, default=10))
    if args.long:
        long(model, base, args.long)


def tensors(weights: DecoderWeights) -> list[torch.Tensor]:
    found = [weights.quantizer.table, weights.quantizer.output_weight, weights.quantizer.output_bias]
    for stage in weights.stages:
        found += [stage.input_proj, stage.output_proj]
        found += [tensor for layer in stage.layers for tensor in vars(layer).values()]
    return found


if __name__ == "__main__":
    main()
