"""The embedded data, the command line, and what is drawn of it."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
import soundfile
import torch

from audiollm import ArgumentError, Request, demo
from audiollm.analysis import layer_norms
from audiollm.cli import main
from audiollm.plots import overview
from audiollm.plots.overview import peaks


@pytest.fixture(scope="module")
def session():
    return demo.load()


@pytest.mark.parametrize("name", demo.SNAPSHOTS)
def test_every_embedded_snapshot_loads_and_answers(name):
    session = demo.load(name)
    assert session.family == name
    assert len(session.generate([Request("Describe this.", [demo.clips()["mix"]])], max_new_tokens=3)) == 1


@pytest.fixture(scope="module")
def batch(session):
    return session.prepare([Request("Describe this.", [demo.clips()["long_mix"], demo.clips()["bass"]])])


def folder_bytes(folder) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", demo.SNAPSHOTS)
def test_the_embedded_snapshot_is_small_and_says_it_is_random(name):
    folder = demo.snapshot(name)
    assert folder_bytes(folder) < 1.5e6
    assert "random weights" in (folder / "README.md").read_text()
    assert folder_bytes(folder.parent / "clips") <= 3e6


def test_unknown_snapshots_are_named():
    with pytest.raises(ArgumentError, match="'music_flamingo'"):
        demo.load("gpt")


def test_stems_add_up_to_the_mix():
    read = {name: soundfile.read(path)[0] for name, path in demo.clips().items()}
    assert np.abs(read["mix"] - read["drums"] - read["bass"] - read["keys"]).max() < 1e-4
    assert 11.5 < len(read["mix"]) / soundfile.info(demo.clips()["mix"]).samplerate < 12.5
    assert soundfile.info(demo.clips()["long_mix"]).duration == pytest.approx(36, abs=0.1)


def test_real_audio_spans_two_windows(batch):
    windows = batch.slots[0].windows
    assert [(w.start_s, w.n_tokens) for w in windows] == [(0.0, 750), (30.0, 150)]


def test_norms_equal_those_of_the_states(session, batch):
    found = layer_norms(session, batch)
    states = session.forward(batch, output_hidden_states=True).hidden_states
    for norms, slot in zip(found, batch.slots, strict=True):
        want = torch.stack([h[slot.sample_index, slot.token_positions].norm(dim=-1) for h in states])
        assert np.allclose(norms.values, want.numpy(), atol=1e-4)
        assert norms.values.shape == (session.n_layers + 1, len(norms.intervals))
    assert [n.layers for n in layer_norms(session, batch, (2, -1))] == [(2, -1)] * 2


def test_peaks_hold_every_extreme():
    samples = np.random.default_rng(0).normal(size=10_007)
    low, high = peaks(samples, 100)
    assert len(low) == len(high) == 100
    assert low.min() == samples.min() and high.max() == samples.max()
    short_low, short_high = peaks(samples[:7], 100)
    assert np.array_equal(short_low, samples[:7]) and np.array_equal(short_high, samples[:7])


def test_the_overview_has_seconds_on_every_axis(session, batch):
    norms = layer_norms(session, batch)
    figure = overview(batch.slots[0], batch.timeline[0], norms[0])
    wave, tokens, layers, _ = figure.axes
    assert layers.get_xlabel() == "seconds of the source"
    for axes in (wave, tokens, layers):
        assert axes.get_xlim() == (0, 36.0)
    assert [t.get_text() for t in wave.texts] == ["window 0", "window 1"]
    mesh = layers.collections[0]
    assert np.allclose(np.asarray(mesh.get_array()).reshape(norms[0].values.shape), norms[0].values)


class Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found, self.images = [], []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.found += [v for k, v in attrs.items() if k in ("href", "src") and not v.startswith("data:")]
        if tag == "img":
            self.images.append(attrs)


def test_the_demo_command_says_what_it_finds_and_writes_a_page(tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["demo", "--out", str(page)]) == 0
    said = capsys.readouterr().out
    wanted = (
        "random weights",
        "900 x 0.04 s at positions",
        "450 x 0.08 s",
        "raw [900, 64]",
        "3 deepstack",
        "32 codebooks",
    )
    for expected in (*wanted, "->"):
        assert expected in said
    links = Links()
    links.feed(page.read_text())
    assert links.found == [] and len(links.images) == 6
    assert all("encoder windows" in image["alt"] for image in links.images)
    assert "random weights" in page.read_text()


def test_errors_of_the_package_are_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "clips", lambda: dict.fromkeys(demo.CLIPS, tmp_path / "gone.flac"))
    assert main(["demo", "--out", str(tmp_path / "page.html")]) == 1
    assert re.fullmatch(r"audiollm: .*gone\.flac cannot be found.*\n", capsys.readouterr().err)


def test_the_command_runs_as_a_module():
    found = subprocess.run([sys.executable, "-m", "audiollm.cli", "--help"], capture_output=True, text=True, check=True)
    assert "demo" in found.stdout
