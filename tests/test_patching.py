"""Patching sweeps: identities, cells by hand, files that go on, and refusals before the model runs."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from looking import hooks, noise, positions

from audiollm import ArgumentError, Request, edits, load_model
from audiollm.analysis import sweep
from audiollm.analysis.answers import answer_scores
from audiollm.analysis.patching import patch_sweep
from audiollm.plots.patching import patching_map

CLEAN = Request("hello there", [noise(32_000)])
CORRUPTED = Request("hello there", [noise(32_000, 5)])

EACH = (("session_mf", "resid"), ("session_moss", "resid"), ("session_moss", "attn_out"), ("session_moss", "mlp_out"))


def contrast(logits):
    """Of logits about 1 in size, so that 1e-6 can be asked for."""
    assert logits.dtype == torch.float32 and logits.dim() == 2
    return logits[:, 5] - logits[:, 7]


def moss(session_moss, metric=contrast, clean=CLEAN, corrupted=CORRUPTED, **settings):
    return patch_sweep(session_moss, clean, corrupted, metric, **{"layers": (0, 2), "seconds": 0.8, **settings})


def by_hand(session, point_module, side, new, columns, batch):
    """The last logits with rows `new` put in at `columns`, by one torch hook."""

    def before(module, args, kwargs):
        states = args[0].clone()
        states[0, columns] = new
        return (states, *args[1:]), kwargs

    def after(module, args, output):
        states = output[0].clone() if isinstance(output, tuple) else output.clone()
        states[0, columns] = new
        return (states, *output[1:]) if isinstance(output, tuple) else states

    if side == "in":
        handle = point_module.register_forward_pre_hook(before, with_kwargs=True)
    else:
        handle = point_module.register_forward_hook(after)
    with torch.no_grad():
        logits = session.model(**batch.inputs, position_ids=positions(batch)).logits[:, -1]
    handle.remove()
    return float(contrast(logits))


# Identities


@pytest.mark.parametrize(("session", "point"), EACH, indirect=["session"])
def test_patching_with_itself_changes_nothing(session, point):
    grid = patch_sweep(session, CLEAN, CLEAN, contrast, point, layers=(1,), seconds=2.0, also=("all",), batch_size=1)
    assert grid.clean == grid.corrupted and np.isnan(grid.recovered).all() and grid.complete
    assert np.abs(grid.values - grid.clean).max() < 1e-6 and np.abs(grid.also_values - grid.clean).max() < 1e-6
    assert "nothing to recover" in grid.describe()


def test_patching_everything_gives_the_clean_run(session):
    """All positions of any block's input; the audio alone where text has not yet mixed it in."""
    last = session.n_layers
    grid = patch_sweep(session, CLEAN, CORRUPTED, contrast, layers=(0, 1, last), seconds=None, also=("all", "last"))
    assert abs(grid.clean - grid.corrupted) > 0.01
    assert np.allclose(grid.also_recovered[:, 0], 1, atol=1e-3)
    assert grid.recovered[0, 0] == pytest.approx(1, abs=1e-3) and abs(grid.recovered[1, 0] - 1) > 0.01
    # before the final norm only the last position matters, and before block 0 its text is the same in both
    assert grid.also_recovered[:, 1] == pytest.approx([0, grid.also_recovered[1, 1], 1], abs=1e-3)
    whole = patch_sweep(session, CLEAN, CORRUPTED, contrast, "projected", seconds=None)
    assert whole.points == ("projected",) and whole.recovered == pytest.approx(1, abs=1e-3)


def test_deepstack_comes_in_after_the_place(session_moss):
    """What is still to come is patched too: block k's stream at resid[k] and before, not at resid[k + 1]."""
    for layers, gives_clean in (((0, 1, 2), False), ((3,), True)):
        held = moss(session_moss, layers=layers, seconds=None, also=("all",), deepstack=False)
        assert (np.abs(held.also_recovered - 1) < 1e-3).all() == gives_clean
        assert (np.abs(held.also_recovered - 1) < 1e-3).any() == gives_clean
    every = moss(session_moss, layers=(0, 1, 2, 3), seconds=None, also=("all",))
    assert np.allclose(every.also_recovered, 1, atol=1e-3)


# Cells by hand


@pytest.mark.parametrize(("session", "point"), EACH, indirect=["session"])
def test_a_cell_by_hand(session, point):
    k = 2 if point == "resid" else 1
    grid = patch_sweep(session, CLEAN, CORRUPTED, contrast, point, layers=(k,), seconds=0.8, deepstack=False)
    clean, corrupted = session.prepare([CLEAN]), session.prepare([CORRUPTED])
    (place,) = session.points(f"{point}[{k}]")
    seen = session.capture(clean, place.name, seconds=(0.8, 1.6))[place.name]
    columns = torch.from_numpy(seen.rows.position)
    wanted = by_hand(session, place.module, place.side, seen.values, columns, corrupted)
    assert grid.windows.tolist() == [[0.0, 0.8], [0.8, 1.6], [1.6, 2.0]] and grid.points == (place.name,)
    assert grid.values[0, 1] == pytest.approx(wanted, abs=1e-5)
    assert abs(wanted - grid.corrupted) > 1e-4
    assert grid.recovered[0, 1] == pytest.approx((wanted - grid.corrupted) / (grid.clean - grid.corrupted), abs=1e-3)


def test_answers_as_metric_by_hand(session_moss):
    """One token, several, and pairs with one or two beginnings; each equals the scores of the answers under the edit."""
    clean, corrupted = session_moss.prepare([CLEAN]), session_moss.prepare([CORRUPTED])
    for metric, variants in (("hello there", 1), (("hello there", "what"), 2), ([7, 9], 1), (([7], [9]), 1)):
        grid = moss(session_moss, metric, layers=(3,), also=("all", "last"))
        signs = (1,) if not isinstance(metric, tuple) else (1, -1)
        answers = (metric,) if not isinstance(metric, tuple) else metric

        def score(batch, answers=answers, signs=signs):
            totals = [answer_scores(session_moss, batch, [answer]).total[0] for answer in answers]
            return float(sum(sign * total for sign, total in zip(signs, totals, strict=True)))

        assert grid.clean == pytest.approx(score(clean), abs=1e-4)
        assert grid.corrupted == pytest.approx(score(corrupted), abs=1e-4)
        with session_moss.edit({"resid[3]": edits.swap(clean)}, seconds=(0.8, 1.6)):
            assert grid.values[0, 1] == pytest.approx(score(corrupted), abs=1e-4)
        with session_moss.edit({"resid[3]": edits.swap(clean)}, tokens=[corrupted.width - 1]):
            assert grid.also_values[0, 1] == pytest.approx(score(corrupted), abs=1e-4)
        assert grid.also_recovered[0, 0] == pytest.approx(1, abs=1e-2)
        assert grid.n_forwards == variants * (2 + 1 + 5)
        assert grid.metric.startswith("log-probability of ") and ("minus" in grid.metric) == (len(signs) == 2)


def test_sources_are_patched_as_asked(session_moss):
    def two(seed):
        return Request("what", [noise(32_000, seed), noise(16_000, seed + 1)])

    settings = {"clean": two(0), "corrupted": two(7), "layers": (0,), "seconds": None, "deepstack": False}
    clean, corrupted = session_moss.prepare([two(0)]), session_moss.prepare([two(7)])
    for source, chosen in ((None, None), (1, 1), ([0], 0)):
        grid = moss(session_moss, source=source, also=("audio",), **settings)
        with session_moss.edit({"resid[0]": edits.swap(clean)}, tokens="audio", source=chosen):
            wanted = float(contrast(session_moss.forward(corrupted).logits[:, 0].float())[0])
        assert grid.values[0, 0] == pytest.approx(wanted, abs=1e-5) and grid.also_values[0, 0] == grid.values[0, 0]
        assert grid.windows.tolist() == [[0.0, 1.0 if source == 1 else 2.0]]


def test_batches_do_not_matter_and_hops_overlap(session_moss):
    one = moss(session_moss, hop_s=0.4, also=("last",), batch_size=1)
    many = moss(session_moss, hop_s=0.4, also=("last",), batch_size=7)
    assert one.values.shape == (2, 4) and one.windows[:, 0].tolist() == pytest.approx([0, 0.4, 0.8, 1.2])
    assert np.allclose(one.values, many.values, atol=1e-5) and np.allclose(one.also_values, many.also_values, atol=1e-5)
    assert one.n_forwards == many.n_forwards == 2 + 2 * (5 + 1)


def test_a_model_in_bfloat16_is_scored_in_float32(tiny_moss):
    low = load_model(tiny_moss, device="cpu", dtype=torch.bfloat16)
    grid = moss(low, contrast, also=("all",))  # `contrast` asserts the dtype
    assert grid.complete and np.allclose(grid.also_values, grid.clean, atol=0.1)


# Files, stopping, interrupts


def test_a_sweep_goes_on_from_its_file(session_moss, tmp_path):
    path, asked = tmp_path / "sweep.npz", []

    def stop():
        asked.append(1)
        return len(asked) > 2

    whole = moss(session_moss, also=("all",))
    part = moss(session_moss, also=("all",), path=path, batch_size=3, stop=stop)
    assert np.isfinite(part.values).tolist() == [[True] * 3, [False] * 3] and not part.complete
    assert part.also_values[0, 0] == pytest.approx(whole.also_values[0, 0], abs=1e-5)
    assert "4 cells were not measured" in part.describe() and "4 of 8 cells" in repr(part)
    rest = moss(session_moss, also=("all",), path=path, batch_size=3)
    assert rest.complete and np.allclose(rest.values, whole.values, atol=1e-5)
    assert (part.n_forwards, rest.n_forwards) == (2 + 1 + 4, 2 + 1 + 4)
    assert moss(session_moss, also=("all",), path=path).n_forwards == 2
    assert [p.name for p in tmp_path.iterdir()] == ["sweep.npz"]
    event = threading.Event()
    event.set()
    assert np.isnan(moss(session_moss, stop=event).values).all()


@pytest.mark.parametrize(
    ("change", "word"),
    (
        ({"seconds": 0.4}, "windows differ"),
        ({"layers": (0, 3)}, "points differ"),
        ({"corrupted": Request("hello there", [noise(32_000, 6)])}, "corrupted differ"),
        ({"metric": "hello"}, "metric differ"),
        ({"metric": lambda logits: logits[:, 0]}, "metric differ"),
        ({"deepstack": False}, "deepstack differ"),
        ({"also": ("last",)}, "also differ"),
    ),
)
def test_a_file_of_another_sweep_is_refused(session_moss, tmp_path, change, word):
    path = tmp_path / "sweep.npz"
    moss(session_moss, path=path)
    kept = path.read_bytes()
    with pytest.raises(ArgumentError, match=word):
        moss(session_moss, path=path, **change)
    assert path.read_bytes() == kept


def test_another_metric_of_the_same_name_and_damaged_files_are_refused(session_moss, tmp_path):
    path = tmp_path / "sweep.npz"

    def named(index):
        def metric(logits):
            return logits[:, index]

        return metric

    moss(session_moss, named(0), path=path)
    with pytest.raises(ArgumentError, match="its runs score"):
        moss(session_moss, named(1), path=path)
    for damaged in (b"", b"not a zip", path.read_bytes()[:-40]):
        path.write_bytes(damaged)
        with pytest.raises(ArgumentError, match="cannot be read as a sweep"):
            moss(session_moss, named(0), path=path)
    with pytest.raises(ArgumentError, match="not a folder"):
        moss(session_moss, path=tmp_path / "nowhere" / "sweep.npz")


def test_an_interrupt_leaves_a_file_to_go_on_from(session_moss, tmp_path, monkeypatch):
    path, before, calls = tmp_path / "sweep.npz", hooks(session_moss), []
    real = sweep.np.savez

    def contrast_until(logits):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return contrast(logits)

    with pytest.raises(KeyboardInterrupt):
        moss(session_moss, contrast_until, path=path, batch_size=1)
    assert hooks(session_moss) == before and not session_moss._contexts and not session_moss._running

    def half(file, **arrays):
        file.write(b"PK half")
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep.np, "savez", half)  # an interrupt while the file is written leaves the one before
    with pytest.raises(KeyboardInterrupt):
        moss(session_moss, contrast_until, path=path, batch_size=1)
    monkeypatch.setattr(sweep.np, "savez", real)
    rest = moss(session_moss, contrast_until, path=path, batch_size=1)
    assert rest.complete and rest.n_forwards == 2 + 2 + 6 - 2
    assert np.allclose(rest.values, moss(session_moss).values, atol=1e-5)


def test_after_an_error_within_a_patched_forward_the_hooks_are_as_before(session_moss):
    before, calls = hooks(session_moss), []

    def raising(module, args):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("mine")

    handle = session_moss._adapter.head().register_forward_pre_hook(raising)
    with pytest.raises(RuntimeError, match="mine"):
        moss(session_moss)
    handle.remove()
    assert hooks(session_moss) == before and not session_moss._contexts


# Refusals


@pytest.mark.parametrize(
    ("clean", "corrupted", "word"),
    (
        (CLEAN, Request("hello there", [noise(30_000)]), r"25 audio tokens \(2.000 s\) in clean and 24 \(1.875 s\)"),
        (CLEAN, Request("hello there you", [noise(32_000)]), "tokens in clean and"),
        (CLEAN, Request("hello there", [noise(32_000), noise(32_000)]), "1 source.s. and corrupted 2"),
        (
            Request("7<audio>9", [noise(32_000)]),
            Request("79<audio>", [noise(32_000)]),
            "is marker in clean and user in",
        ),
        (Request("hello"), CORRUPTED, "0 source"),
        ("clip.wav", CORRUPTED, "pass a Request"),
    ),
)
def test_runs_that_do_not_lie_alike_are_refused(session_moss, clean, corrupted, word):
    with pytest.raises(ArgumentError, match=word):
        moss(session_moss, clean=clean, corrupted=corrupted)


def test_a_batch_of_several_requests_is_refused_and_another_text_is_said(session_moss):
    with pytest.raises(ArgumentError, match=r"2 request\(s\)"):
        moss(session_moss, clean=session_moss.prepare([CLEAN, CLEAN]))
    grid = moss(
        session_moss,
        clean=Request("7", [noise(32_000)]),
        corrupted=session_moss.prepare([Request("9", [noise(32_000, 5)])]),
    )
    assert not grid.same_text and "texts of the two prompts differ" in grid.describe()


@pytest.mark.parametrize(
    ("arguments", "source"),
    (
        ({"point": "residual"}, "layers"),
        ({"point": "residual", "layers": None}, "points"),
        ({"point": "logits", "layers": None}, "point"),
        ({"point": "language_model", "layers": None}, "point"),
        ({"layers": ()}, "layers"),
        ({"layers": 3}, "layers"),
        ({"layers": (99,)}, "points"),
        ({"seconds": 0.01}, "seconds"),
        ({"seconds": 800}, "seconds"),
        ({"hop_s": 5.0}, "hop_s"),
        ({"source": 3}, "source"),
        ({"also": ("everything",)}, "also"),
        ({"point": "projected", "layers": None, "also": ("last",)}, "also"),
        ({"metric": ""}, "answers"),
        ({"batch_size": 0}, "batch_size"),
        ({"stop": 1}, "stop"),
    ),
)
def test_what_is_refused_before_the_model_runs(session_moss, arguments, source, monkeypatch):
    monkeypatch.setattr(type(session_moss), "forward", lambda *a, **k: pytest.fail("the model ran"))
    with pytest.raises(ArgumentError) as raised:
        moss(session_moss, **arguments)
    assert raised.value.source == source


def test_a_metric_must_give_one_number_a_request(session_moss):
    for metric, got in ((lambda logits: logits, r"\[1, "), (lambda logits: 3.0, "float")):
        with pytest.raises(ArgumentError, match=rf"the metric returned {got}"):
            moss(session_moss, metric)


# Words and pictures


def test_words_and_pictures(session_moss):
    grid = moss(session_moss, also=("all",))
    assert repr(grid) == repr(moss(session_moss, also=("all",))) and "resid[0] to resid[2] x 3 windows" in repr(grid)
    k, w = np.unravel_index(np.argmax(grid.recovered), grid.recovered.shape)
    assert f"at {grid.points[k]}, {grid.windows[w, 0]:.2f}-" in grid.describe()
    figure = patching_map(grid)
    drawn = figure.axes[0].collections[0]
    assert np.allclose(drawn.get_array().reshape(grid.recovered.shape), grid.recovered)
    assert "seconds" in figure.axes[0].get_xlabel() and figure.axes[0].get_xlim() == (0, 2)
    assert [label.get_text() for label in figure.axes[1].get_xticklabels()] == ["all"]
    event = threading.Event()
    event.set()
    assert patching_map(moss(session_moss, stop=event)) and patching_map(moss(session_moss, corrupted=CLEAN))
