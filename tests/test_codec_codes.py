"""Codes as callers hold them: what is taken, and one clear error for everything else."""

from __future__ import annotations

import json
import time
import warnings

import numpy as np
import pytest
import torch
from codec_cases import DATA, TOLERANCE, gguf_model, relative_rms, rewrite_gguf, snapshot_model
from hypothesis import given
from hypothesis import strategies as st

from audiollm import codec
from audiollm.codec.codes import CodeSpace, check_codes
from audiollm.errors import AudioLLMError

SPACE = CodeSpace(n_codebooks=32, codebook_size=1024, absent=1024)
FULL = CodeSpace(n_codebooks=32, codebook_size=1024, absent=None)
MANIFEST = [entry for entry in json.loads((DATA / "odd" / "manifest.json").read_text()) if "file" not in entry]
ROWS = next(entry["codes"] for entry in MANIFEST if entry["id"] == "codes_rows")


def manifest_codes(entry: dict) -> object:
    if "codes_expr" in entry:
        return eval(entry["codes_expr"], {"np": np, "rows": ROWS, "float": float})
    return entry["codes"]


@pytest.mark.parametrize("entry", MANIFEST, ids=lambda entry: entry["id"])
@pytest.mark.parametrize("space", [SPACE, FULL], ids=["absent", "no_absent"])
def test_odd_codes_behave_as_their_manifest_says(entry, space):
    expect, codes = entry["expect"], manifest_codes(entry)
    started = time.perf_counter()
    outcome = expect["outcome"]
    if entry["id"] == "codes_range":  # the absent id is legal where it is declared
        outcome = "accept" if space.absent == 1024 else "reject"
    if entry["id"] == "codes_T" and space.absent is None:  # narrow rows need an absent id
        outcome = "reject"
    if outcome == "accept":
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            table = check_codes(codes, space)
        assert len(table) == expect.get("frames", len(table))
        assert bool(caught) == (entry["id"] == "codes_T")
        if expect.get("same_audio_as") == "codes_rows":
            np.testing.assert_array_equal(table, ROWS)
    else:
        with pytest.raises(codec.CodesError) as error:
            check_codes(codes, space)
        assert error.value.code == expect.get("error", "bad_codes")
        assert expect.get("message", "") in str(error.value)
    assert time.perf_counter() - started < 1


@pytest.mark.parametrize(
    ("codes", "words"),
    [
        ([[0] * 32, [0] * 31 + [1025]], "frame 1, codebook 31: id 1025"),
        ([[0] * 32, [0, -1] + [0] * 30], "frame 1, codebook 1: id -1"),
        ([[0] * 5 + [float("nan")] + [0] * 26], "frame 0, codebook 5: nan"),
        ([[0] * 5 + [2.5] + [0] * 26], "frame 0, codebook 5: 2.5"),
        (np.array([[0.0] * 31 + [np.inf]]), "frame 0, codebook 31: inf"),
        (np.array([[0.0] * 31 + [7.25]]), "frame 0, codebook 31: 7.25"),
        ([0.0] * 33 + [0.5] + [0.0] * 30, "frame 1, codebook 1: 0.5"),
        ([[0] * 32, [0] * 33], "frame 1 has 33 codes"),
        (np.zeros((32, 100), dtype=int), "pass codes.T"),
        ([[0] * 40] * 32, "codebook-major"),
        (np.zeros((1, 3, 32), dtype=int), "shape (1, 3, 32)"),
        ([[0] * 32, 7], "frame 1 is a int"),
        ([[0] * 32, []], "frame 1 is empty"),
        ([[0] * 31 + ["7"]], "frame 0, codebook 31 is '7'"),
        ([[0] * 31 + [None]], "frame 0, codebook 31 is None"),
        ([[True] * 32], "frame 0, codebook 0 is True"),
        (np.ones((1, 32), dtype=bool), "dtype bool"),
        (np.zeros((0, 32), dtype=int), "at least one frame"),
        ([0] * 33, "33 is not a multiple of 32"),
        ("0 1 2", "codes is a str"),
        ({0: 1}, "codes is a dict"),
        (None, "codes is a NoneType"),
        (7, "codes is a int"),
        ([[2**70] * 32], "is outside 0-1023"),
        (np.full((1, 32), 2**64 - 1, dtype=np.uint64), "is outside 0-1023"),
    ],
)
def test_bad_codes_name_frame_and_codebook(codes, words):
    with pytest.raises(codec.CodesError) as error:
        check_codes(codes, SPACE)
    assert error.value.code == "bad_codes" and error.value.source == "codes"
    assert words in str(error.value)


@pytest.mark.parametrize(
    "codes",
    [
        ROWS,
        [tuple(row) for row in ROWS],
        np.array(ROWS, dtype=np.int16),
        np.array(ROWS, dtype=np.uint64),
        np.array(ROWS, dtype=np.float32),
        np.asfortranarray(np.array(ROWS)),
        np.array(ROWS).reshape(-1),
        [float(code) for row in ROWS for code in row],
        [np.array(row) for row in ROWS],
        torch.tensor(ROWS),
        torch.tensor(ROWS, dtype=torch.bfloat16) if max(map(max, ROWS)) < 256 else torch.tensor(ROWS),
        [torch.tensor(row) for row in ROWS],
        (row for row in ROWS),
    ],
    ids=lambda codes: type(codes).__name__,
)
def test_every_form_is_the_same_table(codes):
    table = check_codes(codes, SPACE)
    assert table.dtype == np.int64
    np.testing.assert_array_equal(table, ROWS)


def test_narrow_and_ragged_rows_are_filled_only_with_a_declared_absent_id():
    ragged = [[1, 2, 3], [4, 5], [6]]
    np.testing.assert_array_equal(check_codes(ragged, SPACE), [[1, 2, 3], [4, 5, 1024], [6, 1024, 1024]])
    for codes in (ragged, [[1, 2, 3]]):
        with pytest.raises(codec.CodesError, match="absent id"):
            check_codes(codes, FULL)
    np.testing.assert_array_equal(check_codes([[1, 2, 3]], FULL, num_codebooks=2), [[1, 2]])


def test_a_declared_absent_id_may_be_any_past_the_entries():
    space = CodeSpace(n_codebooks=2, codebook_size=8, absent=99)
    np.testing.assert_array_equal(check_codes([[99, 3]], space), [[8, 3]])
    with pytest.raises(codec.CodesError, match="id 8 is outside"):
        check_codes([[8, 3]], space)


@pytest.mark.parametrize("depth", [0, 33, -1, 1.5, True, "12"])
def test_a_prefix_is_a_depth_that_the_model_has(depth):
    with pytest.raises(codec.CodesError) as error:
        check_codes(ROWS, SPACE, num_codebooks=depth)
    assert error.value.source == "num_codebooks"


def test_a_prefix_deeper_than_the_rows_is_refused():
    with pytest.raises(codec.CodesError, match="rows hold 3"):
        check_codes([[1, 2, 3]], SPACE, num_codebooks=12)


def test_the_ceiling_can_be_moved_and_lifted():
    codes = np.zeros((4097, 32), dtype=int)
    assert len(check_codes(codes, SPACE, max_frames=None)) == 4097
    assert len(check_codes(codes, SPACE, max_frames=5000)) == 4097
    for ceiling in (0, -1, 2.5, True, "9"):
        with pytest.raises(codec.CodesError) as error:
            check_codes(codes, SPACE, max_frames=ceiling)
        assert error.value.source == "max_frames"


def test_the_ceiling_stands_before_anything_runs():
    model = snapshot_model("tiny")
    for call in (model.codes2speech.infer, model.codes2speech.stream, model.capture):
        started = time.perf_counter()
        with pytest.raises(codec.CodesError) as error:
            call([[0] * 32] * 4097)
        assert error.value.code == "too_many_frames" and "4097" in str(error.value)
        assert time.perf_counter() - started < 0.5


def test_absent_codes_add_exactly_nothing():
    from audiollm.vendor.moss_audio_tokenizer import dequantize

    quantizer = gguf_model().decoder.quantizer
    with torch.inference_mode():
        silent = dequantize(quantizer, torch.full((1, 32), 64))
    assert torch.equal(silent[0], quantizer.output_bias)


def test_a_file_without_an_absent_id_takes_whole_rows_only(tmp_path):
    path = rewrite_gguf(tmp_path / "full.gguf", metadata={"loom.codec.absent_code": None})
    model = codec.Model.from_file(path, device="cpu")
    codes = np.arange(96).reshape(3, 32) % 64
    whole = model.codes2speech.infer(codes)
    assert relative_rms(whole.samples, gguf_model().codes2speech.infer(codes).samples) <= TOLERANCE
    for bad in (codes[:, :12], np.full((1, 32), 64)):
        with pytest.raises(codec.CodesError):
            model.codes2speech.infer(bad)
    prefix = model.codes2speech.infer(codes, num_codebooks=12)
    assert relative_rms(prefix.samples, gguf_model().codes2speech.infer(codes[:, :12]).samples) <= TOLERANCE


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=12,
)


@given(anything)
def test_anything_is_a_table_or_our_error(codes):
    space = CodeSpace(n_codebooks=2, codebook_size=4, absent=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            table = check_codes(codes, space)
        except AudioLLMError:
            return
    assert table.ndim == 2 and table.min() >= 0 and table.max() <= 4
