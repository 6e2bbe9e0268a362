"""The embedded snapshots hear 40 short held-out clips and answer as they did when they were made.

A slip in the mel spectrogram, in rotary time, in positions, in DeepStack or in the prompt then shows as a musical error. That
it does is shown here too, by making each of these mistakes on a third of the questions.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from audiollm import Request, Session, demo

FOLDER = Path(__file__).parent / "data" / "answers"
MOST_CHANGED = 2
BATCH = 10

pytestmark = pytest.mark.skipif(not (FOLDER / "answers.json").is_file(), reason="no answers are stored yet")


def questions() -> list[dict[str, Any]]:
    return json.loads((FOLDER / "answers.json").read_text(encoding="utf-8"))


def changed(session: Session, asked: list[dict[str, Any]]) -> list[str]:
    """The questions that are not answered as stored, with both answers."""
    asked = sorted(asked, key=lambda case: sum((FOLDER / name).stat().st_size for name in case["clips"]))
    found = []
    for start in range(0, len(asked), BATCH):
        some = asked[start : start + BATCH]
        requests = [Request(case["prompt"], [FOLDER / name for name in case["clips"]]) for case in some]
        for case, said in zip(some, session.generate(requests, max_new_tokens=16), strict=True):
            if said != case["said"][session.family]:
                found.append(f"{case['clips']}: {case['said'][session.family]!r} became {said!r}")
    return found


def test_the_clips_are_small_and_the_stored_answers_are_right() -> None:
    cases = questions()
    assert len(cases) == 40
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 1_500_000
    assert {name for case in cases for name in case["clips"]} == {path.name for path in FOLDER.glob("*.flac")}
    for case in cases:
        last = case["right"].split()[-1] if case["task"] == "quality" else case["right"]
        assert all(said.split()[-1] == last or said == last for said in case["said"].values())


@pytest.mark.parametrize("name", demo.SNAPSHOTS)
def test_answers_are_those_that_were_stored(name: str) -> None:
    found = changed(demo.load(name), questions())
    assert len(found) <= MOST_CHANGED, found


# Mistakes, each made on one loaded model.


def wrong_mel(session: Session, patch: pytest.MonkeyPatch) -> None:
    """Frames every 150 samples instead of 160, as if the audio were slower and lower."""
    adapter: Any = session._adapter
    features = adapter.features

    def stretched(waveforms: list[np.ndarray]) -> Any:
        every = [np.interp(np.arange(len(w)) * 150 / 160, np.arange(len(w)), w).astype(np.float32) for w in waveforms]
        return features(every)

    patch.setattr(adapter, "features", stretched)


def wrong_positions(session: Session, patch: pytest.MonkeyPatch) -> None:
    """The language model's rotary base is 10,000 instead of 1,000,000."""
    rotary: Any = session._adapter.decoder().rotary_emb
    n = len(rotary.inv_freq)
    patch.setattr(rotary, "inv_freq", 10_000.0 ** -(torch.arange(n, dtype=torch.float32) / n))


def wrong_template(session: Session, patch: pytest.MonkeyPatch) -> None:
    """The assistant's turn is not opened."""
    adapter: Any = session._adapter
    encode = adapter.encode_prompt

    def unopened(content: str, n_tokens: list[int]) -> Any:
        prompt = encode(content, n_tokens)
        n = len(adapter.tokenizer("<|im_start|>assistant\n")["input_ids"])
        for column in (prompt.ids, prompt.roles, prompt.sources, prompt.marker_s):
            del column[-n:]
        return prompt

    patch.setattr(adapter, "encode_prompt", unopened)


def no_rotary_time(session: Session, patch: pytest.MonkeyPatch) -> None:
    """Music Flamingo without rotary time: every token is at second 0."""
    inner: Any = session.model.model
    build = inner._build_audio_timestamps
    patch.setattr(inner, "_build_audio_timestamps", lambda *args: torch.zeros_like(build(*args)))


def no_deepstack(session: Session, patch: pytest.MonkeyPatch) -> None:
    """MOSS-Music without what DeepStack adds to the first language layers."""
    for merger in session.model.deepstack_audio_merger_list:
        patch.setattr(
            merger, "forward", lambda states, width=merger.down_proj.out_features: states.new_zeros(len(states), width)
        )


Mistake = Callable[[Session, pytest.MonkeyPatch], None]
MISTAKES: tuple[tuple[str, Mistake], ...] = (
    *((name, mistake) for name in demo.SNAPSHOTS for mistake in (wrong_mel, wrong_positions, wrong_template)),
    ("music_flamingo", no_rotary_time),
    ("moss_music", no_deepstack),
)


@pytest.mark.parametrize(("name", "mistake"), MISTAKES, ids=[f"{name}-{m.__name__}" for name, m in MISTAKES])
def test_a_mistake_changes_answers(name: str, mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    session = demo.load(name)
    mistake(session, monkeypatch)
    found = changed(session, questions()[::3])
    print(f"{name} {mistake.__name__}: {len(found)} of {len(questions()[::3])} answers changed")
    assert len(found) > MOST_CHANGED
