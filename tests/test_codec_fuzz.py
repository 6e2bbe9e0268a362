"""Hypothesis against the GGUF reader: no hang, no memory blow-up, no exception but ours.

`AUDIOLLM_FUZZ_SECONDS` sets how long it goes on (5 by default, 60 in CI); the seeds are fixed, so a longer run begins
with the same examples as a shorter one.
"""

from __future__ import annotations

import itertools
import os
import resource
import signal
import struct
import sys
import time

import numpy as np
import pytest
from codec_cases import GGUF, gguf_model
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from audiollm import codec
from audiollm.codec.gguf_file import GgufFile
from audiollm.errors import AudioLLMError

SECONDS = float(os.environ.get("AUDIOLLM_FUZZ_SECONDS", "5"))
WHOLE = GGUF.read_bytes()
HEADER = min(info.start for info in GgufFile(GGUF).tensors.values())
EXTREMES = [0, 1, 2, 3, 8, 9, 31, 63, 64, 65, 2**31 - 1, 2**31, 2**32 - 1, 2**60, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
# Where a count, length, type or offset lies: every 8-byte string length of the header, and what stands around it.
FIELDS = [at for at in range(8, HEADER - 8) if 0 < struct.unpack_from("<Q", WHOLE, at)[0] < 70] or [8]

offsets = st.one_of(
    st.integers(0, 64),
    st.integers(0, HEADER - 1),
    st.sampled_from(FIELDS),
    st.sampled_from(FIELDS).map(lambda at: at + 4),
    st.integers(0, len(WHOLE) - 1),
)
values = st.one_of(
    st.binary(min_size=1, max_size=8),
    st.sampled_from(EXTREMES).map(lambda n: struct.pack("<Q", n)),
    st.sampled_from(EXTREMES).map(lambda n: struct.pack("<I", n & 0xFFFFFFFF)),
    st.floats(width=32).map(lambda x: struct.pack("<f", x)),
)
overwrites = st.tuples(st.just("overwrite"), offsets, values)
inserts = st.tuples(st.just("insert"), offsets, values)
deletes = st.tuples(st.just("delete"), offsets, st.integers(1, 64))
repeats = st.tuples(st.just("repeat"), offsets, st.integers(1, 512))
cuts = st.tuples(st.just("cut"), offsets, st.just(0))
mutations = st.lists(st.one_of(overwrites, overwrites, inserts, deletes, repeats, cuts), min_size=1, max_size=4)


def mutate(edits: list) -> bytes:
    data = bytearray(WHOLE)
    for what, at, value in edits:
        if what == "overwrite":
            data[at : at + len(value)] = value
        elif what == "insert":
            data[at:at] = value
        elif what == "delete":
            del data[at : at + value]
        elif what == "repeat":
            data[at:at] = data[at : at + value]
        else:
            del data[at:]
    return bytes(data)


def peak_mib() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="needs an alarm to notice a hang")
@pytest.mark.filterwarnings("ignore")
def test_mutated_files_load_or_are_refused(tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "mutated.gguf"
    codes = np.zeros((1, 32), dtype=int)
    gguf_model().codes2speech.infer(codes)
    before, done = peak_mib(), {"refused": 0, "loaded": 0}

    def hang(*_):
        raise AssertionError("a mutated file took more than 10 s")

    def check(edits):
        path.write_bytes(mutate(edits))
        signal.setitimer(signal.ITIMER_REAL, 10)
        try:
            model = codec.Model.from_file(path, device="cpu")
            done["loaded"] += 1
            frame = np.zeros((1, model.code_space.n_codebooks), dtype=int)
            audio = model.codes2speech.infer(frame)
            assert len(audio) == model.config.samples_per_frame
        except AudioLLMError as error:
            assert error.source == str(path)
            done["refused"] += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    old = signal.signal(signal.SIGALRM, hang)
    stop = time.monotonic() + SECONDS
    try:
        for number in itertools.count():
            batch = settings(max_examples=100, deadline=None, database=None, suppress_health_check=list(HealthCheck))
            seed(number)(batch(given(mutations)(check)))()
            if time.monotonic() > stop:
                break
    finally:
        signal.signal(signal.SIGALRM, old)
    print(f"{done['refused']} refused, {done['loaded']} loaded, peak memory +{peak_mib() - before:.0f} MiB")
    assert done["refused"] > 0 and done["loaded"] > 0
    assert peak_mib() - before < 300
