"""A loom GGUF of given decoder weights, and a process that decodes it with the loom engine.

The graph is the one that `tests/data/codec/gguf/tiny_v2.gguf` carries (blocks of queries, each with the blocks of keys
that its window reaches, gathered by row number), written for any size; `python benchmarks/codec_loom.py check` rebuilds
the small file's graph and compares. The layer scales are folded into the weights, so the file's are 1.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path

import gguf
import numpy as np
from audiollm.vendor.moss_audio_tokenizer import DecoderWeights, StageConfig

PAD = 4  # frames: the driver pads a clip to whole blocks, and stage s works in blocks of PAD * 2 ** s rows
DRIVER = """-- infer(inputs): inputs.codes = flat frame-major ids, {n} per frame; returns interleaved samples
local function take(t, n)
  local o = {{}}
  for i = 1, n do o[i] = t[i] end
  return o
end
function infer(inputs)
  local codes = inputs.codes
  local n = math.floor(#codes / {n})
  local padded = math.floor((n + {last}) / {pad}) * {pad}
  local buf = take(codes, n * {n})
  for i = n * {n} + 1, padded * {n} do buf[i] = {absent} end
  local wav, shape = loom.run_subgraph('main_topology', {{n_codes = padded, n_past = 0}}, {{codes = buf}})
  return take(wav, n * {samples})
end
"""


class Graph:
    """Nodes of a topology, each value named `_1`, `_2` ..., and the constants that they need."""

    def __init__(self) -> None:
        self.nodes: list[dict] = []
        self.constants: dict[str, np.ndarray] = {}
        self.biases = 0

    def add(self, op: str, *inputs: str, **attrs: object) -> str:
        name = f"_{len(self.nodes) + 1}"
        node: dict = {"op": op, "inputs": list(inputs), "outputs": [name]}
        if attrs:
            node["attrs"] = attrs
        self.nodes.append(node)
        return name

    def linear(self, weight: str, x: str, width: int) -> str:
        self.biases += 1
        bias = f"linear_{self.biases}_bias_0"
        self.constants[bias] = np.zeros(width, np.float32)
        return self.add("ADD", self.add("MUL_MAT", weight, x), bias)

    def norm(self, x: str, name: str) -> str:
        normed = self.add("LAYER_NORM", x, eps=1e-05)
        return self.add("ADD", self.add("MUL", normed, f"{name}_weight"), f"{name}_bias")


def build_graph(weights: DecoderWeights) -> tuple[Graph, dict]:
    config, graph = weights.config, Graph()
    n = config.n_codebooks
    graph.constants |= {"neg_const": np.float32([-1e30]), "minus_one": np.float32([-1])}
    graph.constants["model__loom_decoder_offsets"] = np.arange(n, dtype=np.float32) * (config.codebook_size + 1)
    ids = graph.add("ADD", graph.add("CAST", "codes", dtype="f32"), "model__loom_decoder_offsets")
    ids = graph.add("RESHAPE", graph.add("CAST", ids, dtype="i32"), shape=[f"{n}*n_codes"])
    rows = graph.add("GET_ROWS", "model__loom_decoder_table", ids)
    rows = graph.add("RESHAPE", rows, shape=[config.rvq_dim, n, "n_codes", 1])
    x = graph.add("REDUCE_SUM", rows, axis=1, keep_dims=False)
    x = graph.add("MUL_MAT", "model__loom_decoder_output_proj_weight", x)
    x = graph.add("ADD", x, "model__loom_decoder_output_proj_bias")
    ratio = 1
    for ordinal, stage in enumerate(config.decoder):
        x = add_stage(graph, ordinal, stage, ratio, x)
        patch, width = stage.patch, stage.output_dim // stage.patch
        x = graph.add("RESHAPE", x, shape=[patch, width, f"{ratio}*n_codes", 1])
        x = graph.add("PERMUTE", x, axes=[1, 0, 2, 3])
        ratio *= patch
        x = graph.add("RESHAPE", x, shape=[width, f"{ratio}*n_codes", 1])
    out = graph.add("RESHAPE", x, shape=[-1, 1])
    inputs = [{"name": "codes", "dtype": "i32", "shape": [str(n), "n_codes", "1"]}]
    return graph, {"version": 1, "inputs": inputs, "output": out, "nodes": graph.nodes}


def add_stage(graph: Graph, ordinal: int, stage: StageConfig, ratio: int, x: str) -> str:
    own, blocks = f"model__loom_decoder_stages_{ordinal}", f"n_codes/{PAD}"
    flat, hd, heads, d = stage.name.replace(".", "_"), stage.head_dim, stage.heads, stage.d_model
    block = PAD * ratio
    reach = math.ceil((stage.context - 1) / block) + 1
    x = graph.linear(f"model_{flat}_input_proj_weight", x, d)
    index = np.arange(hd // 2, dtype=np.float32)
    frequency = np.repeat(np.exp(index * np.float32(-math.log(10_000) * 2 / hd)), 2)
    back = np.arange((reach - 1) * block, reach * block)[:, None] - np.arange(reach * block)[None]
    graph.constants[f"{own}_inv_freq"] = frequency.reshape(hd, 1).astype(np.float32)
    graph.constants[f"{own}_ones_p"] = np.ones((reach, 1), np.float32)
    graph.constants[f"{own}_ones_B"] = np.ones((block, 1), np.float32)
    graph.constants[f"{own}_key_block_offsets"] = np.arange(1 - reach, 1, dtype=np.float32)
    graph.constants[f"{own}_window_mask"] = np.where((back >= 0) & (back < stage.context), 0, -1e30).astype(np.float32)
    graph.constants[f"{own}_scale"] = np.float32([hd**-0.5])
    position = graph.add("RANGE_1D", start=0, end=f"{ratio}*n_codes", step=1)
    angle = graph.add("MUL_MAT", f"{own}_inv_freq", graph.add("RESHAPE", position, shape=[1, f"{ratio}*n_codes"]))
    angle = graph.add("RESHAPE", angle, shape=[hd, 1, f"{ratio}*n_codes", 1])
    cos, sin = graph.add("COS", angle), graph.add("SIN", angle)
    key_block = graph.add("RESHAPE", graph.add("RANGE_1D", start=0, end=blocks, step=1), shape=[1, blocks])
    key_block = graph.add("ADD", graph.add("MUL_MAT", f"{own}_ones_p", key_block), f"{own}_key_block_offsets")
    gather = graph.add("CAST", graph.add("RELU", key_block), dtype="i32")
    gather = graph.add("RESHAPE", gather, shape=[f"{reach}*{blocks}"])
    before = graph.add("CLAMP", graph.add("MUL", key_block, "minus_one"), min=0.0, max=1.0)
    before = graph.add("MUL_MAT", f"{own}_ones_B", graph.add("RESHAPE", before, shape=[1, f"{reach}*{blocks}"]))
    before = graph.add("RESHAPE", graph.add("MUL", before, "neg_const"), shape=[reach * block, 1, 1, blocks])

    def turned(rows: str) -> str:
        whole = graph.add("RESHAPE", rows, shape=[hd, heads, f"{ratio}*n_codes", 1])
        pairs = graph.add("RESHAPE", whole, shape=[2, hd // 2 * heads, f"{ratio}*n_codes", 1])
        odd = graph.add("VIEW", pairs, shape=[1, hd // 2 * heads, f"{ratio}*n_codes", 1], offset=4)
        odd = graph.add("MUL", odd, "minus_one")
        even = graph.add("VIEW", pairs, shape=[1, hd // 2 * heads, f"{ratio}*n_codes", 1], offset=0)
        other = graph.add("RESHAPE", graph.add("CONCAT", odd, even, dim=0), shape=[hd, heads, f"{ratio}*n_codes", 1])
        return graph.add("ADD", graph.add("MUL", whole, cos), graph.add("MUL", other, sin))

    def gathered(rows: str) -> str:
        rows = graph.add("GET_ROWS", graph.add("RESHAPE", rows, shape=[block * d, blocks]), gather)
        return graph.add("RESHAPE", rows, shape=[hd, heads, reach * block, blocks])

    for j in range(stage.layers):
        layer = f"model_{flat}_transformer_layers_{j}"
        normed = graph.norm(x, f"{layer}_norm1")
        q, k, v = (graph.linear(f"{own}_qkv_{j}_{part}_weight", normed, d) for part in range(3))
        q, k = turned(q), turned(k)
        q = graph.add("RESHAPE", q, shape=[hd, heads, block, blocks])
        q = graph.add("PERMUTE", q, axes=[0, 2, 1, 3])
        k, v = gathered(k), gathered(v)
        k = graph.add("PERMUTE", k, axes=[0, 2, 1, 3])
        v = graph.add("PERMUTE", v, axes=[0, 2, 1, 3])
        v = graph.add("CONT", graph.add("PERMUTE", v, axes=[1, 0, 2, 3]))
        scores = graph.add("MUL", graph.add("MUL_MAT", k, q), f"{own}_scale")
        scores = graph.add("ADD", graph.add("ADD", scores, f"{own}_window_mask"), before)
        mixed = graph.add("MUL_MAT", v, graph.add("SOFTMAX", scores))
        mixed = graph.add("PERMUTE", mixed, axes=[0, 2, 1, 3])
        mixed = graph.add("RESHAPE", mixed, shape=[d, f"{ratio}*n_codes", 1])
        out = graph.linear(shortened(f"{layer}_self_attn_out_proj_weight"), mixed, d)
        x = graph.add("ADD", x, graph.add("MUL", out, f"{layer}_layer_scale_1_scale"))
        hidden = graph.linear(f"{layer}_ffn_0_weight", graph.norm(x, f"{layer}_norm2"), stage.ff)
        out = graph.linear(f"{layer}_ffn_2_weight", graph.add("GELU", hidden), d)
        x = graph.add("ADD", x, graph.add("MUL", out, f"{layer}_layer_scale_2_scale"))
    return graph.linear(f"model_{flat}_output_proj_weight", x, stage.output_dim)


def shortened(name: str) -> str:
    from audiollm.codec.gguf_names import NAME_LIMIT, shorten

    return shorten(name) if len(name) >= NAME_LIMIT else name


def write_gguf(weights: DecoderWeights, path: Path) -> None:
    """Write the weights as a loom F32 GGUF; tensors are views of the weights, so nothing is held twice."""
    config = weights.config
    graph, topology = build_graph(weights)
    writer = gguf.GGUFWriter(path, "loom-moss-audio-tokenizer")
    for key, text in (
        ("loom.architecture", "moss-audio-tokenizer"),
        ("loom.task", "audio-codec"),
        ("loom.input.kind", "audio_codes"),
        ("loom.output.kind", "audio"),
    ):
        writer.add_string(key, text)
    numbers = {"n": config.n_codebooks, "pad": PAD, "last": PAD - 1, "absent": config.codebook_size}
    writer.add_string("model.driver_script", DRIVER.format(**numbers, samples=config.samples_per_frame))
    writer.add_uint32("loom.codec.n_codebooks", config.n_codebooks)
    writer.add_uint32("loom.codec.codebook_size", config.codebook_size)
    writer.add_float32("loom.codec.frame_rate", config.frame_rate)
    writer.add_uint32("loom.sample_rate", config.sample_rate)
    writer.add_uint32("loom.channels", config.channels)
    writer.add_uint32("loom.codec.absent_code", config.codebook_size)
    writer.add_string("model.graph_topology.main_topology", json.dumps(topology))
    tensors = dict(graph.constants)
    tensors["model__loom_decoder_table"] = weights.quantizer.table.numpy()
    tensors["model__loom_decoder_output_proj_weight"] = weights.quantizer.output_weight.numpy()
    tensors["model__loom_decoder_output_proj_bias"] = weights.quantizer.output_bias.numpy()
    for ordinal, stage in enumerate(weights.stages):
        flat, d = stage.config.name.replace(".", "_"), stage.config.d_model
        tensors[f"model_{flat}_input_proj_weight"] = stage.input_proj.numpy()
        tensors[f"model_{flat}_output_proj_weight"] = stage.output_proj.numpy()
        for j, layer in enumerate(stage.layers):
            name = f"model_{flat}_transformer_layers_{j}"
            tensors[f"{name}_norm1_weight"], tensors[f"{name}_norm1_bias"] = (
                layer.norm1_weight.numpy(),
                layer.norm1_bias.numpy(),
            )
            tensors[f"{name}_norm2_weight"], tensors[f"{name}_norm2_bias"] = (
                layer.norm2_weight.numpy(),
                layer.norm2_bias.numpy(),
            )
            for part in range(3):
                tensors[f"model__loom_decoder_stages_{ordinal}_qkv_{j}_{part}_weight"] = layer.qkv.numpy()[
                    part * d : (part + 1) * d
                ]
            tensors[shortened(f"{name}_self_attn_out_proj_weight")] = layer.out.numpy()
            tensors[f"{name}_ffn_0_weight"], tensors[f"{name}_ffn_2_weight"] = layer.up.numpy(), layer.down.numpy()
            tensors[f"{name}_layer_scale_1_scale"] = tensors[f"{name}_layer_scale_2_scale"] = np.ones(d, np.float32)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def worker(path: str) -> None:
    """Load the file, then decode every codes file named on stdin; answers are JSON lines on stdout."""
    import loom

    model = loom.Model.from_file(path, device="cpu")
    print(json.dumps({"ready": peak_rss()}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        codes = np.load(request["codes"]).reshape(-1).astype(float).tolist()
        started, cpu = time.perf_counter(), time.process_time()
        samples = model.infer(codes=codes)
        wall, cpu = time.perf_counter() - started, time.process_time() - cpu
        if request.get("out"):
            np.save(request["out"], np.float32(samples))
        print(json.dumps({"wall": wall, "cpu": cpu, "peak": peak_rss()}), flush=True)


def peak_rss() -> float:
    """This process's peak resident memory in GiB."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def check(path: Path) -> None:
    """Rebuild the small file's graph; value for value and constant for constant it must be the one it carries."""
    from audiollm.codec import Model
    from audiollm.codec.gguf_file import GgufFile

    file, model = GgufFile(path), Model.from_file(path, device="cpu")
    graph, topology = build_graph(model.decoder)
    theirs = json.loads(file.text("model.graph_topology.main_topology"))
    assert topology == theirs, [
        pair for pair in zip(topology["nodes"], theirs["nodes"], strict=False) if pair[0] != pair[1]
    ][:3]
    for name, array in graph.constants.items():
        if name in file.tensors:
            np.testing.assert_allclose(file.read(name).numpy(), array, rtol=1e-6)
    print(f"{path.name}: {len(graph.nodes)} nodes and {len(graph.constants)} constants agree")


if __name__ == "__main__":
    if sys.argv[1] == "check":
        check(Path(__file__).resolve().parent.parent / "tests" / "data" / "codec" / "gguf" / "tiny_v2.gguf")
    else:
        worker(sys.argv[2])
