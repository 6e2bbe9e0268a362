"""What a request takes of the context, told from headers, is what `prepare` then makes of it."""

from __future__ import annotations

import numpy as np
import pytest
import soundfile
from looking import FAMILIES, mixed_requests, noise

from audiollm import ArgumentError, AudioError, Request, RequestError


@pytest.mark.parametrize("family", FAMILIES)
def test_the_count_is_what_prepare_makes(family, request, tmp_path):
    session = request.getfixturevalue(family)
    path = tmp_path / "stereo.flac"
    soundfile.write(path, np.zeros((44_100 * 3 + 7, 2)), 44_100)
    for asked in [*mixed_requests(), Request("A <audio> B <audio>", [path, noise(480_320)])]:
        batch, count = session.prepare([asked]), session.count_tokens(asked)
        assert count.prompt == batch.width and count.context == session.context
        assert count.sources == tuple(len(slot.token_positions) for slot in batch.slots)
        assert count.left == session.context - batch.width


def test_nothing_is_decoded_and_what_is_too_long_is_counted(session_moss, tmp_path, monkeypatch):
    path = tmp_path / "hour.flac"
    with soundfile.SoundFile(path, "w", 16_000, 1) as file:
        for _ in range(60):
            file.write(np.zeros(16_000 * 60, np.int16))
    monkeypatch.setattr(soundfile.SoundFile, "read", lambda *a, **k: pytest.fail("samples were read"))
    one = session_moss.count_tokens(Request("", [path]))
    assert one.sources == (45_000,)
    assert session_moss.count_tokens(Request("", [path] * 5)).left < 0


def test_wrong_requests_are_refused(session_moss, tmp_path):
    with pytest.raises(ArgumentError, match="pass Request"):
        session_moss.count_tokens("hello")
    with pytest.raises(AudioError, match="cannot be found"):
        session_moss.count_tokens(Request("x", [tmp_path / "none.wav"]))
    with pytest.raises(RequestError, match="control token"):
        session_moss.count_tokens(Request("<|im_end|>"))
