"""Does a GPU in bfloat16 compute what the CPU computes in float32?

Runs the embedded snapshots, one family after the other, on both: prepare, audio embeddings, contextual embeddings,
forward, an edit by a hook, looking inside, gradients, generation. Integers must be equal; for values the relative rms difference,
rms(device - cpu) / rms(cpu), must stay under the limit of the dtype (gradients: three times that). A mistake, such as
a window counted to the wrong source or rotary tables in bfloat16, moves it far above. Greedy text is printed and not
compared: one rounding can change a word of a random model.

    python benchmarks/cuda_check.py                                     # on a machine with a GPU
    python benchmarks/cuda_check.py --device cpu --dtype bfloat16       # a dry run anywhere, under a minute
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from audiollm import PreparedBatch, Request, Session, Waveform, demo, edits, load_model
from audiollm.analysis import attention_over_time, integrated_gradients, logit_lens

LIMITS = {torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float32: 2e-3}
GRADIENT_FACTOR = 3


class Absent(Exception):
    """A family that is not here yet."""


class Report:
    """Prints one line a comparison and remembers what failed."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.failed: list[str] = []

    def values(self, name: str, found: torch.Tensor, wanted: torch.Tensor, factor: float = 1.0) -> None:
        """Compare floats by relative rms."""
        found, wanted = found.detach().cpu().double(), wanted.detach().cpu().double()
        if found.shape != wanted.shape:
            self.fact(f"{name}: shape {list(found.shape)} instead of {list(wanted.shape)}", False)
            return
        difference = found - wanted
        relative = float(difference.pow(2).mean().sqrt() / wanted.pow(2).mean().sqrt())
        good = relative <= factor * self.limit  # False for NaN
        self._line(
            good,
            f"{name:34s} relative rms {relative:.2e}, most {float(difference.abs().max()):.2e} {list(found.shape)}",
        )

    def fact(self, name: str, good: bool) -> None:
        """Note something that is so or not."""
        self._line(good, name)

    def _line(self, good: bool, text: str) -> None:
        print(f"  {'ok  ' if good else 'FAIL'} {text}")
        if not good:
            self.failed.append(text)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare a device and dtype with the CPU in float32.")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--dtype", default="bfloat16", choices=[str(dtype).removeprefix("torch.") for dtype in LIMITS])
    parser.add_argument("--attention", default="sdpa", choices=("sdpa", "eager", "flash_attention_2"))
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    args = parser.parse_args()
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; add --device cpu for a dry run")
    torch.set_num_threads(1)  # the embedded models are so small that CPU threads only wait for each other
    report = Report(LIMITS[dtype])
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    print(f"{where}, {args.dtype}, {args.attention}, torch {torch.__version__}; limit {report.limit:g} relative rms")
    for name in args.families:
        start = time.perf_counter()
        try:
            FAMILIES[name](report, device, dtype, args.attention)
        except Absent as reason:
            print(f"{name}: skipped, {reason}")
        else:
            print(f"{name}: {time.perf_counter() - start:.1f} s")
    if device.type == "cuda":
        print(f"peak GPU memory {torch.cuda.max_memory_allocated(device) / 2**20:.0f} MiB")
    print(f"{len(report.failed)} comparison(s) failed" if report.failed else "all within the limits")
    return 1 if report.failed else 0


def check_music_flamingo(report: Report, device: torch.device, dtype: torch.dtype, attention: str) -> None:
    """Requests of several and of no sources, and a 30 s window followed by a tail too short for a token."""
    requests = [
        Request("Describe this.", [demo.clips()["mix"]]),
        Request("What is a chord?"),
        Request("A: <audio>\nB: <audio>\nCompare.", [_tone(480_320, 16_000), _tone(32_000, 16_000)]),
    ]
    _check_language_model("music_flamingo", requests, report, device, dtype, attention)


def check_moss_music(report: Report, device: torch.device, dtype: torch.dtype, attention: str) -> None:
    """Requests of several and of no sources, and chunks of 4 s with a short tail."""
    requests = [
        Request("Describe this.", [demo.clips()["mix"]]),
        Request("What is a chord?"),
        Request("A: <audio>\nB: <audio>\nCompare.", [_tone(64_160, 16_000), _tone(8_000, 16_000)]),
    ]
    _check_language_model("moss_music", requests, report, device, dtype, attention)


def check_codec(report: Report, device: torch.device, dtype: torch.dtype, attention: str) -> None:
    """Two seconds of codes to sound."""
    try:
        from audiollm.codec import demo_codes, demo_model
    except ImportError as error:
        raise Absent(str(error)) from None
    print("codec")
    wanted, found = (
        torch.from_numpy(np.array(demo_model(*place).codes2speech.infer(demo_codes()).samples))
        for place in (("cpu", torch.float32), (device, dtype))
    )
    report.values("codes to sound", found, wanted)


FAMILIES: dict[str, Callable[[Report, torch.device, torch.dtype, str], None]] = {
    "music_flamingo": check_music_flamingo,
    "moss_music": check_moss_music,
    "codec": check_codec,
}


def _check_language_model(
    name: str,
    requests: Sequence[Request],
    report: Report,
    device: torch.device,
    dtype: torch.dtype,
    attention: str,
) -> None:
    if name not in demo.SNAPSHOTS:
        raise Absent("there is no embedded snapshot of it")
    print(name)
    cpu = load_model(demo.snapshot(name), "cpu", torch.float32)
    session = load_model(demo.snapshot(name), device, dtype, attention)
    wanted, found = cpu.prepare(requests), session.prepare(requests)
    _check_prepare(report, session, found, wanted)
    _check_embeddings(report, session, cpu, found, wanted)
    _check_forward(report, session, cpu, found, wanted)
    short = [Request("Listen.", [_tone(32_000, 16_000)]), Request("What is a chord?")]
    found, wanted = session.prepare(short), cpu.prepare(short)
    _check_hook(report, session, cpu, found, wanted)
    _check_gradient(report, session, cpu, found, wanted)
    _check_looking(report, session, cpu, found, wanted)
    _check_generation(report, session, cpu, short)


def _check_prepare(report: Report, session: Session, found: PreparedBatch, wanted: PreparedBatch) -> None:
    there = all(tensor.device == session.device for tensor in found.inputs.values())
    report.fact(f"prepare: inputs lie on {session.device}", there)
    for name, tensor in wanted.inputs.items():
        if tensor.is_floating_point():
            report.values(f"prepare: {name}", found.inputs[name], tensor)
        else:
            report.fact(f"prepare: {name} equal", torch.equal(found.inputs[name].cpu(), tensor))
    places = zip(found.slots, wanted.slots, strict=True)
    report.fact("prepare: positions equal", all(torch.equal(a.token_positions, b.token_positions) for a, b in places))


def _check_embeddings(
    report: Report, session: Session, cpu: Session, found: PreparedBatch, wanted: PreparedBatch
) -> None:
    ours, theirs = session.extract_audio_embeddings(found), cpu.extract_audio_embeddings(wanted)
    for a, b in zip(ours, theirs, strict=True):
        where = f"audio {a.sample_index}.{a.audio_index}"
        report.values(f"{where}: raw", a.raw, b.raw)
        report.values(f"{where}: projected", a.projected, b.projected)
        for k, (deep, reference) in enumerate(zip(a.deepstack_projected, b.deepstack_projected, strict=True)):
            report.values(f"{where}: deepstack {k}", deep, reference)
    layers = range(session.n_layers + 1)
    ours = session.extract_contextual_embeddings(found, layers)
    theirs = cpu.extract_contextual_embeddings(wanted, layers)
    held = sum(states.nbytes for source in ours for states in source.values())
    report.fact(f"contextual: {held:,} bytes kept, as nbytes says", held == found.nbytes(layers))
    for k in layers:
        report.values(
            f"contextual: layer {k}", torch.cat([each[k] for each in ours]), torch.cat([each[k] for each in theirs])
        )


def _check_forward(report: Report, session: Session, cpu: Session, found: PreparedBatch, wanted: PreparedBatch) -> None:
    ours = session.forward(found, output_hidden_states=True)
    theirs = cpu.forward(wanted, output_hidden_states=True)
    report.values("forward: logits", ours.logits, theirs.logits)
    # Rows of padding hold values without meaning.
    real = wanted.inputs["attention_mask"].bool()
    for k, (states, reference) in enumerate(zip(ours.hidden_states, theirs.hidden_states, strict=True)):
        report.values(f"forward: layer {k}", states.cpu()[real], reference[real])


def _check_hook(report: Report, session: Session, cpu: Session, found: PreparedBatch, wanted: PreparedBatch) -> None:
    """A user's hook that halves what the middle block hands on is seen, and nothing of ours or theirs stays behind."""
    last: list[list[torch.Tensor]] = []
    for one, batch in ((session, found), (cpu, wanted)):
        before = _last_layer(one, batch)
        hooks = _count_hooks(one)
        block = _decoder_blocks(one)[one.n_layers // 2 - 1]
        handle = block.register_forward_hook(_halved)
        try:
            edited = _last_layer(one, batch)
        finally:
            handle.remove()
        last.append([before, edited, _last_layer(one, batch)])
        report.fact(f"hook on {one.device}: none stays behind", _count_hooks(one) == hooks)
        report.fact(f"hook on {one.device}: the edit is seen", not torch.equal(before, edited))
        report.fact(f"hook on {one.device}: the edit is gone after", torch.equal(before, last[-1][2]))
    report.values("hook: last layer under the edit", last[0][1], last[1][1])


def _check_looking(report: Report, session: Session, cpu: Session, found: PreparedBatch, wanted: PreparedBatch) -> None:
    """Captured points under an edit, the lens, attention rows, and integrated gradients."""
    points = ["encoder.block[0]", "projected", "resid[1]", "attn_out[1]", "mlp_out[1]", "logits"]
    seen, attended, entropies, attributed = [], [], [], []
    for one, batch in ((session, found), (cpu, wanted)):
        hooks = _count_hooks(one)
        with one.edit({"resid[1]": edits.scale(0.5)}, seconds=(0.5, 1.0)):
            seen.append(one.capture(batch, points))
        attended.append(torch.from_numpy(attention_over_time(one, batch, "a b")[0].weights))
        entropies.append(torch.from_numpy(logit_lens(one, batch).entropy))
        attributed.append(integrated_gradients(one, batch, "a b", steps=16)[0].score)
        with one.observe("resid[1]", device=None) as steps:
            one.generate(batch.requests[:1], max_new_tokens=3)
        report.fact(f"observe on {one.device}: values stay there", steps["resid[1]"].values.device == one.device)
        report.fact(f"looking on {one.device}: no hook stays behind", _count_hooks(one) == hooks)
    for name in points:
        report.values(f"capture under an edit: {name}", seen[0][name].values, seen[1][name].values)
    report.values("attention over time", *attended)
    report.values("logit lens: entropy", *entropies)
    report.values("integrated gradients: score", *(torch.as_tensor(score) for score in attributed))


def _check_gradient(
    report: Report, session: Session, cpu: Session, found: PreparedBatch, wanted: PreparedBatch
) -> None:
    """d(sum of squares of the last layer) / d(mel), from one backward pass through everything."""
    gradients = []
    for one, batch in ((session, found), (cpu, wanted)):
        mel = next(tensor for tensor in batch.inputs.values() if tensor.is_floating_point())
        mel.requires_grad_(True)
        states = one.extract_contextual_embeddings(batch, grad=True)
        torch.cat([each[-1] for each in states]).float().pow(2).sum().backward()
        gradients.append(mel.grad)
        mel.requires_grad_(False)
        mel.grad = None
        one.model.zero_grad(set_to_none=True)
    report.values("gradient: mel", gradients[0], gradients[1], factor=GRADIENT_FACTOR)


def _check_generation(report: Report, session: Session, cpu: Session, requests: Sequence[Request]) -> None:
    ours, again = (session.generate(requests, max_new_tokens=8) for _ in range(2))
    theirs = cpu.generate(requests, max_new_tokens=8)
    report.fact(f"generate: {len(ours)} answers", len(ours) == len(requests) and all(isinstance(t, str) for t in ours))
    report.fact("generate: the same twice", ours == again)
    for text, reference in zip(ours, theirs, strict=True):
        print(f"       {text!r} here, {reference!r} on the CPU")


def _last_layer(session: Session, batch: PreparedBatch) -> torch.Tensor:
    return torch.cat([each[-1] for each in session.extract_contextual_embeddings(batch)])


def _halved(module: torch.nn.Module, args: tuple, output: torch.Tensor | tuple) -> torch.Tensor | tuple:
    return (output[0] * 0.5, *output[1:]) if isinstance(output, tuple) else output * 0.5


def _decoder_blocks(session: Session) -> torch.nn.ModuleList:
    """The longest list of modules under the language model."""
    lists = [
        module
        for name, module in session.model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and "language_model" in name and len(module) == session.n_layers
    ]
    return lists[0]


def _count_hooks(session: Session) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in session.model.modules())


def _tone(n_samples: int, sample_rate: int) -> Waveform:
    """A rising tone with a little noise."""
    time_s = np.arange(n_samples) / sample_rate
    noise = np.random.default_rng(0).standard_normal(n_samples)
    return Waveform(0.3 * np.sin(2 * np.pi * (200 + 10 * time_s) * time_s) + 0.01 * noise, sample_rate)


if __name__ == "__main__":
    sys.exit(main())
