"""GGUF files: damaged ones are refused at once, other builds of the same weights decode alike."""

from __future__ import annotations

import json
import re
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from codec_cases import DATA, GGUF, TOLERANCE, gguf_audio, gguf_codes, relative_rms, rewrite_gguf

from audiollm import codec
from audiollm.codec.gguf_file import GgufFile
from audiollm.codec.gguf_names import shorten

ODD = [e for e in json.loads((DATA / "odd" / "manifest.json").read_text()) if e.get("file", "").endswith(".gguf")]
MASKS = [f"model__loom_decoder_stages_{s}_window_mask" for s in range(6)]
SCALE = "model__loom_decoder_stages_0_scale"
FREQUENCIES = "model__loom_decoder_stages_0_inv_freq"
TABLE = "model__loom_decoder_table"


Model = codec.Model  # imported now, so that no test's clock pays for it


def load(path) -> codec.Model:
    return Model.from_file(path, device="cpu")


def refused(path, code="bad_weights") -> str:
    with pytest.raises(codec.ModelFileError) as error:
        load(path)
    assert error.value.code == code and str(path) == error.value.source
    return str(error.value)


@pytest.mark.parametrize("entry", ODD, ids=lambda entry: entry["id"])
def test_odd_files_are_refused_in_under_a_second(entry):
    started = time.perf_counter()
    refused(DATA / "odd" / entry["file"], entry["expect"]["error"])
    assert time.perf_counter() - started < 1


def test_the_manifest_is_whole():
    assert len(ODD) == 12


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("magic", "no GGUF"),
        ("big_endian", "big-endian"),
        ("version_99", "version 99"),
        ("cut", "cut inside its header"),
        ("empty", "empty"),
        ("kv_count_2_60", "1152921504606846976 metadata entries"),
        ("tensor_count_2_60", "1152921504606846976 tensors"),
        ("string_length_2_62", "a string of 4611686018427387904 bytes"),
        ("array_length_2_60", "takes 4611686018427387904 bytes"),
        ("dims_overflow", "takes 1361129467683753853853498429727072845824 bytes"),
        ("n_dims_max", "4294967295 dimensions"),
        ("nested_arrays", "arrays inside an array"),
    ],
)
def test_the_header_itself_says_what_is_wrong(name, words):
    with pytest.raises(codec.ModelFileError) as error:
        GgufFile(DATA / "odd" / f"{name}.gguf")
    assert words in str(error.value)


def test_another_model_is_named_as_such(tmp_path):
    """Before any tensor is looked for: a file of another architecture has none of ours."""
    writer = gguf.GGUFWriter(tmp_path / "lfm2.gguf", "loom-lfm2")
    writer.add_string("loom.architecture", "lfm2")
    writer.add_tensor("token_embd.weight", np.ones((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "'lfm2' model" in refused(tmp_path / "lfm2.gguf", "unsupported")


def test_a_lfs_pointer_is_named(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    assert "LFS pointer" in refused(path)


@pytest.mark.parametrize("cut", [1, 4, 5_000, 50_000, 600_000])
def test_a_cut_file_is_refused(tmp_path, cut):
    path = tmp_path / "cut.gguf"
    path.write_bytes(GGUF.read_bytes()[:-cut])
    refused(path)


def entry_at(data: bytes, name: str) -> int:
    """Where the tensor entry's dimensions begin."""
    at = data.index(struct.pack("<Q", len(name)) + name.encode())
    return at + 8 + len(name)


@pytest.mark.parametrize(
    ("what", "edit", "words"),
    [
        ("offset past the end", lambda d, at: struct.pack_into("<Q", d, at + 24, 1 << 40), "outside the file"),
        ("offset misaligned", lambda d, at: struct.pack_into("<Q", d, at + 24, 33), "misaligned"),
        ("offset of another", lambda d, at: struct.pack_into("<Q", d, at + 24, 0), "overlap"),
        ("unknown type", lambda d, at: struct.pack_into("<I", d, at + 20, 200), "unknown type"),
        ("no width", lambda d, at: struct.pack_into("<Q", d, at + 4, 0), "dimensions"),
        ("five dimensions", lambda d, at: struct.pack_into("<I", d, at, 5), "5 dimensions"),
        ("wider than its neighbour", lambda d, at: struct.pack_into("<Q", d, at + 4, 64), "overlap"),
        ("half a block", lambda d, at: struct.pack_into("<QQI", d, at + 4, 33, 24, 8), "Q8_0"),
    ],
)
def test_a_damaged_tensor_entry_is_named(tmp_path, what, edit, words):
    name = "model_decoder_0_transformer_layers_0_self_attn_out_proj_weight"
    data = bytearray(GGUF.read_bytes())
    edit(data, entry_at(bytes(data), name))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    assert words in refused(path)


def test_repeated_names_are_refused(tmp_path):
    data = bytearray(GGUF.read_bytes())
    a, b = (entry_at(bytes(data), f"model_decoder_0_transformer_layers_{i}_norm1_bias") for i in (0, 1))
    data[b - 40 : b] = data[a - 40 : a]
    path = tmp_path / "twice.gguf"
    path.write_bytes(data)
    assert "appears twice" in refused(path)


def test_a_repeated_key_is_refused(tmp_path):
    entry = struct.pack("<Q1sII", 1, b"k", 4, 7)
    path = tmp_path / "twice.gguf"
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 2) + entry + entry)
    assert "'k' appears twice" in refused(path)


@pytest.mark.parametrize("alignment", [0, 3, 48, 2**31])
def test_a_silly_alignment_is_refused(tmp_path, alignment):
    refused(rewrite_gguf(tmp_path / "a.gguf", metadata={"general.alignment": alignment}))


@pytest.mark.parametrize(
    "dropped",
    [
        "model_decoder_4_input_proj_weight",
        "model_decoder_4_transformer_layers_0_layer_scale_2_scale",
        "model__loom_decoder_stages_2_qkv_0_1_weight",
        "model__loom_decoder_output_proj_bias",
        TABLE,
    ],
)
def test_a_missing_tensor_is_named(tmp_path, dropped):
    words = refused(rewrite_gguf(tmp_path / "less.gguf", tensors={dropped: None}))
    assert f"{dropped} is missing" in words


@pytest.mark.parametrize(
    ("tensors", "code", "words"),
    [
        ({"model_decoder_4_output_proj_weight": np.ones((32, 31), np.float32)}, "bad_weights", "shape"),
        ({"model_decoder_4_transformer_layers_0_norm1_bias": np.ones(31, np.float32)}, "bad_weights", "shape [31]"),
        ({"model_decoder_4_transformer_layers_0_norm1_bias": np.full(32, np.nan, np.float32)}, "bad_weights", "NaN"),
        ({"linear_6_bias_0": np.ones(64, np.float32)}, "unsupported", "bias that is not zero"),
        ({SCALE: np.array([0.3], np.float32)}, "unsupported", "scale"),
        ({FREQUENCIES: np.ones((16, 1), np.float32)}, "unsupported", "rotation"),
        ({MASKS[3]: np.zeros((32, 64), np.float32)}, "unsupported", "causal window"),
        ({"model__loom_decoder_offsets": np.zeros(32, np.float32)}, "bad_weights", "offsets"),
        ({TABLE: np.ones((2080, 16), np.float32)}, "bad_weights", "absent code are not zero"),
        ({TABLE: np.ones((2079, 16), np.float32)}, "bad_weights", "2079 rows"),
        ({"other_decoder_0_input_proj_weight": np.ones((32, 24), np.float32)}, "bad_weights", "several"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else None,
)
def test_tensors_that_mean_something_else_are_refused(tmp_path, tensors, code, words):
    assert words in refused(rewrite_gguf(tmp_path / "other.gguf", tensors=tensors), code)


@pytest.mark.parametrize(
    ("metadata", "code", "words"),
    [
        ({"loom.architecture": "lfm2"}, "unsupported", "'lfm2'"),
        ({"loom.architecture": None}, "unsupported", "loom.architecture is missing"),
        ({"loom.architecture": 3}, "bad_weights", "loom.architecture is stored as UINT32"),
        ({"loom.input.kind": "text"}, "unsupported", "loom.input.kind"),
        ({"loom.codec.n_codebooks": None}, "bad_weights", "loom.codec.n_codebooks is missing"),
        ({"loom.codec.n_codebooks": 16}, "bad_weights", "rows"),
        ({"loom.codec.n_codebooks": 0}, "bad_weights", "outside 1-"),
        ({"loom.codec.codebook_size": 63}, "bad_weights", "rows"),
        ({"loom.codec.frame_rate": 25.0}, "bad_weights", "values a second"),
        ({"loom.codec.frame_rate": float("nan")}, "bad_weights", "frame_rate"),
        ({"loom.channels": 1}, "bad_weights", "values a second"),
        ({"loom.sample_rate": 24000}, "bad_weights", "values a second"),
        ({"loom.codec.absent_code": 3}, "bad_weights", "real entry"),
    ],
)
def test_metadata_that_contradicts_the_tensors_is_refused(tmp_path, metadata, code, words):
    assert words in refused(rewrite_gguf(tmp_path / "other.gguf", metadata=metadata), code)


@pytest.mark.parametrize(
    ("aliases", "words"),
    [
        ((["a", "b"], ["linear_1_bias_0"]), "2 names for 1 targets"),
        ((["a"], ["nowhere"]), "stands for nowhere"),
        ((["minus_one"], ["linear_1_bias_0"]), "stands for two tensors"),
        ((["a"], ["linear_1_bias_0"]), "heads 64 wide"),  # the frequencies of stage 1 are aliases
    ],
)
def test_bad_aliases_are_refused(tmp_path, aliases, words):
    assert words in refused(rewrite_gguf(tmp_path / "alias.gguf", aliases=aliases))


def test_weights_behind_aliases_are_found(tmp_path):
    """The exporter stores equal tensors once; here a norm of one layer stands for another's."""
    one, two = (f"model_decoder_0_transformer_layers_{i}_norm1_weight" for i in (0, 1))
    first = GgufFile(GGUF).read(one).numpy()
    plain = rewrite_gguf(tmp_path / "plain.gguf", tensors={two: first})
    file = GgufFile(GGUF)
    names, targets = (list(file.metadata[f"loom.tensor_alias.{word}"].value) for word in ("names", "targets"))
    aliased = rewrite_gguf(tmp_path / "alias.gguf", tensors={two: None}, aliases=([*names, two], [*targets, one]))
    ours = [load(path).codes2speech.infer(gguf_codes("T5")).samples for path in (plain, aliased)]
    np.testing.assert_array_equal(*ours)


def test_a_small_file_cannot_alias_itself_into_a_huge_model(tmp_path):
    wide, layers = 512, 500
    tensors: dict[str, np.ndarray | None] = {
        f"model_decoder_10_{w}_proj_weight": np.ones(s, np.float32)
        for w, s in (("input", (wide, 16)), ("output", (240, wide)))
    }
    shapes = {"norm1_weight": wide, "norm1_bias": wide, "norm2_weight": wide, "norm2_bias": wide}
    shapes |= {"layer_scale_1_scale": wide, "layer_scale_2_scale": wide}
    shapes |= {"ffn_0_weight": (2048, wide), "ffn_2_weight": (wide, 2048), "self_attn_out_proj_weight": (wide, wide)}
    names, targets = [], []
    for role, shape in shapes.items():
        first = f"model_decoder_10_transformer_layers_0_{role}"
        tensors[first] = np.ones(shape, np.float32)
        names += [f"model_decoder_10_transformer_layers_{i}_{role}" for i in range(1, layers)]
        targets += [first] * (layers - 1)
    file = GgufFile(GGUF)
    old = [list(file.metadata[f"loom.tensor_alias.{word}"].value) for word in ("names", "targets")]
    path = rewrite_gguf(tmp_path / "bomb.gguf", tensors=tensors, aliases=(old[0] + names, old[1] + targets))
    started = time.perf_counter()
    assert "weights are announced by a file of" in refused(path)
    assert time.perf_counter() - started < 2


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [("F16", 5e-3), ("BF16", 5e-2), ("Q8_0", 5e-2), ("Q4_0", 0.8)],
)
def test_other_builds_decode_alike(tmp_path, kind, tolerance):
    path = rewrite_gguf(tmp_path / f"{kind}.gguf", kind=gguf.GGMLQuantizationType[kind])
    stored = {info.kind.name for info in GgufFile(path).tensors.values()}
    assert kind in stored
    model = load(path)
    assert relative_rms(model.codes2speech.infer(gguf_codes("T37")).samples, gguf_audio("T37")) <= tolerance


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_quantized_tensors_read_as_gguf_reads_them(tmp_path, kind):
    kind = gguf.GGMLQuantizationType[kind]
    path = rewrite_gguf(tmp_path / "q.gguf", kind=kind)
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    file = GgufFile(path)
    for name, info in file.tensors.items():
        theirs = gguf.dequantize(reader[name].data, reader[name].tensor_type)
        np.testing.assert_array_equal(file.read(name).numpy().reshape(-1), theirs.reshape(-1))
        assert info.shape == tuple(int(n) for n in reversed(reader[name].shape))


def test_a_type_that_is_not_read_is_named(tmp_path):
    path = rewrite_gguf(tmp_path / "q5.gguf", kind=gguf.GGMLQuantizationType.Q5_0)
    assert "Q5_0" in refused(path, "unsupported")


@pytest.mark.parametrize("digest_of", ["flat", "dotted", "unknown"])
def test_shortened_names_are_found(tmp_path, digest_of, caplog):
    """Names of 64 characters and more are cut to 58 with six digits of an MD5; a longer prefix makes them that long."""

    def rename(name: str) -> str:
        full = name.replace("model_", "model_x_", 1) if name.startswith("model_decoder") else name
        if len(full) < 64:
            return full
        stage, layer = re.findall(r"decoder_(\d+)_transformer_layers_(\d+)_self_attn_out_proj_weight", full)[0]
        dotted = f"model.x.decoder.{stage}.transformer.layers.{layer}.self_attn.out_proj.weight"
        return shorten(full, {"flat": full, "dotted": dotted, "unknown": full + "?"}[digest_of])

    path = rewrite_gguf(tmp_path / "short.gguf", rename=rename)
    assert sum(len(name) == 58 for name in GgufFile(path).tensors) >= 7
    model = load(path)
    assert relative_rms(model.codes2speech.infer(gguf_codes("T5")).samples, gguf_audio("T5")) <= TOLERANCE
    assert ("in the order of the file" in caplog.text) == (digest_of == "unknown")


def test_older_names_and_whole_in_proj_are_read(tmp_path):
    file = GgufFile(GGUF)
    tensors: dict[str, np.ndarray | None] = {}
    for s, (d, layers) in enumerate([(0, 2), (2, 1), (4, 1), (6, 1), (8, 1), (10, 1)]):
        for j in range(layers):
            parts = [f"model__loom_decoder_stages_{s}_qkv_{j}_{p}_weight" for p in range(3)]
            whole = np.concatenate([file.read(name).numpy() for name in parts])
            tensors |= dict.fromkeys(parts)
            tensors[f"model_decoder_{d}_transformer_layers_{j}_self_attn_in_projs_0_weight"] = whole

    def rename(name: str) -> str:
        return name.replace("_ffn_0_", "_linear1_").replace("_ffn_2_", "_linear2_")

    model = load(rewrite_gguf(tmp_path / "old.gguf", tensors=tensors, rename=rename))
    assert relative_rms(model.codes2speech.infer(gguf_codes("T5")).samples, gguf_audio("T5")) <= TOLERANCE


def test_a_build_without_masks_has_the_published_windows(tmp_path):
    model = load(rewrite_gguf(tmp_path / "bare.gguf", tensors=dict.fromkeys(MASKS)))
    assert [stage.context for stage in model.config.decoder] == [125, 250, 400, 400, 400, 400]


def test_a_table_without_absent_rows_is_read(tmp_path):
    table = GgufFile(GGUF).read(TABLE).numpy().reshape(32, 65, 16)[:, :64].reshape(-1, 16)
    offsets = {"model__loom_decoder_offsets": np.arange(32, dtype=np.float32) * 64}
    path = rewrite_gguf(tmp_path / "t.gguf", tensors={TABLE: np.ascontiguousarray(table), **offsets})
    for name in ("T5", "T5_mixed"):
        audio = load(path).codes2speech.infer(gguf_codes(name))
        assert relative_rms(audio.samples, gguf_audio(name)) <= TOLERANCE


def test_unused_tensors_are_worth_a_word(tmp_path, caplog):
    load(rewrite_gguf(tmp_path / "more.gguf", tensors={"something_else": np.ones(3, np.float32)}))
    assert "something_else" in caplog.text


@pytest.mark.parametrize("path", ["nowhere.gguf", "bad\0name.gguf"])
def test_a_missing_file_is_not_found(path):
    with pytest.raises(FileNotFoundError) as error:
        load(path)
    assert isinstance(error.value, codec.LoomError) and error.value.code == "not_found"


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(codec.ModelNotFoundError) as error:
        load(tmp_path)
    assert error.value.code == "not_a_file" and "from_pretrained" in str(error.value)


def test_loading_leaves_the_file_free(tmp_path):
    """Nothing of a loaded model lies in the file: it may be replaced or removed."""
    path = tmp_path / "model.gguf"
    path.write_bytes(GGUF.read_bytes())
    model = load(path)
    path.write_bytes(b"")
    assert relative_rms(model.codes2speech.infer(gguf_codes("T5")).samples, gguf_audio("T5")) <= TOLERANCE


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the resident size from /proc")
def test_reading_gives_the_files_pages_back(tmp_path):
    """Or a model would be held twice while it loads, once in the file's pages."""

    def resident_file_mib() -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssFile"))

    path = rewrite_gguf(tmp_path / "wide.gguf", tensors={"wide": np.ones((4096, 4096), np.float32)})
    file = GgufFile(path)
    before = resident_file_mib()
    assert float(file.read("wide").sum()) == 4096 * 4096
    assert resident_file_mib() - before < 16
