"""Hostile checkpoint folders: each must be refused soon, in little memory.

    python -m hostile.checkpoints FOLDER

loads all of them in one process with a memory limit and prints their outcomes as JSON. A case is a change of a valid
checkpoint: `CASES` maps its name to a function of the folder.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
from hostile.limited_process import limit_memory
from places import GOLDEN
from special_files import SPECIAL
from tensor_files import entry, pack, pack_arrays

from kvcache.engine import InferenceEngine
from kvcache.networks.checkpoint import Checkpoint
from kvcache.networks.files import MAX_CONFIG_BYTES, MAX_JSON_BYTES

ROOM = 1 << 30  # bytes that the process may allocate in addition
SECONDS = 300  # for one case; most take milliseconds, the slowest seconds
CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
CASES = {}


def case(name, prepare):
    assert name not in CASES, name
    CASES[name] = prepare


def edit(name, change):
    """Change a JSON file of the folder."""

    def prepare(folder):
        content = json.loads((folder / name).read_text())
        content = change(content) or content
        (folder / name).write_text(json.dumps(content))

    return prepare


def replace(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def header_of(folder):
    content = (folder / SINGLE).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    return header, content[8 + length :]


def tensors(change):
    """Change the header of the single file; its data is kept."""

    def prepare(folder):
        header, data = header_of(folder)
        changed = change(header)
        header = header if changed is None else changed
        (folder / SINGLE).write_bytes(pack(header, data))

    return prepare


def sparse(name, size, first=b""):
    def prepare(folder):
        with open(folder / name, "wb") as file:
            file.write(first)
            file.truncate(size)

    return prepare


def special(name, make):
    def prepare(folder):
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return prepare


def sharded(prepare):
    """A case over the golden checkpoint that has shards."""

    def prepare_shards(folder):
        shutil.rmtree(folder)
        shutil.copytree(GOLDEN / "llama_linear_tied_sharded_f16", folder)
        prepare(folder)

    return prepare_shards


UNREADABLE = SPECIAL | {
    "/dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "/dev/tty": lambda path: path.symlink_to("/dev/tty"),
    "a link to a text": lambda path: path.symlink_to("/etc/passwd"),
    "a link to memory": lambda path: path.symlink_to("/proc/self/mem"),
    "a link to a FIFO": lambda path: (os.mkfifo(path.with_suffix(".pipe")), path.symlink_to(path.with_suffix(".pipe"))),
    "unreadable bytes": lambda path: path.write_bytes(bytes(range(256)) * 4),
}
for kind, make in UNREADABLE.items():
    for name in (CONFIG, SINGLE, "generation_config.json", "tokenizer.json"):
        if kind == "a symbolic link" and name in ("generation_config.json", "tokenizer.json"):
            continue  # a dangling link counts as absent
        case(f"{name}: {kind}", special(name, make))
    for name in (INDEX, "model-00002-of-00005.safetensors"):
        case(f"{name}: {kind}", sharded(special(name, make)))

DEEP, WIDE = b"[" * 50_000 + b"]" * 50_000, b"[]," * (MAX_JSON_BYTES // 3 - 10) + b"[]]"
JSON = {
    "empty": b"",
    "deep": b'{"a":' + DEEP + b"}",
    "deep and not closed": b'{"a":' * 100_000,
    "nearly too deep": b'{"architectures":' + b"[" * 900 + b"]" * 900 + b"}",
    "wide": b'{"architectures": [' + WIDE + b"}",
    "too wide": b'{"architectures": [' + WIDE + b" " * 100 + b"}",
    "NaN": b'{"hidden_size": NaN}',
    "Infinity": b'{"rope_theta": Infinity}',
    "minus Infinity": b'{"x": [-Infinity]}',
    "duplicate keys": b'{"hidden_size": 64, "hidden_size": 65}',
    "duplicate keys far inside": b'{"a": [{"b": {"c": 1, "c": 1}}]}',
    "an int of millions of digits": b'{"a": ' + b"9" * 4_000_000 + b"}",
    "a fraction of millions of digits": b'{"a": 0.' + b"9" * 4_000_000 + b"}",
    "a surrogate": b'{"architectures": ["\\ud800"]}',
    "UTF-16": "{}".encode("utf-16"),
    "UTF-8 with a mark": b"\xef\xbb\xbf{}",
    "zeros": bytes(1000),
    "two objects": b"{} {}",
    "a long name": b'{"architectures": ["' + b"x" * 5_000_000 + b'"]}',
    "a control character": b'{"a\n": 1}',
    "a trailing comma": b'{"a": 1,}',
    "true": b"true",
}
for kind, content in JSON.items():
    case(f"{CONFIG}: {kind}", replace(CONFIG, content if kind != "wide" else content[: MAX_CONFIG_BYTES - 6] + b"[]]}"))
    if kind != "wide":  # the same bytes, read by the same function
        case(f"{INDEX}: {kind}", sharded(replace(INDEX, content)))
    case(f"{SINGLE}: header: {kind}", replace(SINGLE, pack(content)))
for name in (CONFIG, SINGLE):
    case(f"{name}: sparse, 1 TiB", sparse(name, 2**40))
    case(f"{name}: sparse, one byte", sparse(name, 1))
case(f"{INDEX}: sparse, 1 TiB", sharded(sparse(INDEX, 2**40)))
case("tokenizer.json: sparse, 1 TiB", sparse("tokenizer.json", 2**40))
case("tokenizer.json: deep", replace("tokenizer.json", DEEP))
case("generation_config.json: sparse, 1 TiB", sparse("generation_config.json", 2**40))
case("generation_config.json: end of text", replace("generation_config.json", b'{"eos_token_id": [-1]}'))
case(f"{SINGLE}: header to the end of a sparse file", sparse(SINGLE, 2**40, (2**40 - 8).to_bytes(8, "little")))

HUGE = (0, -1, 2**31 - 1, 2**31, 2**63, 2**64, 10**100, 1e300, 1.5, True, "64", [64], {"a": 1})
for key in ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "intermediate_size", "head_dim"):
    for value in HUGE:
        case(f"{CONFIG}: {key} of {value!r:.20}", edit(CONFIG, lambda c, key=key, value=value: c.update({key: value})))
for key, value in (
    ("num_key_value_heads", 3), ("num_key_value_heads", 2**31 - 1), ("max_position_embeddings", 0),
    ("max_position_embeddings", -(2**31)), ("max_position_embeddings", 1e9), ("rms_norm_eps", -1),
    ("rms_norm_eps", "x"), ("rms_norm_eps", 1e31), ("eos_token_id", [[0]]), ("eos_token_id", 2**32),
    ("eos_token_id", [0.5] * 1000),
    ("architectures", [["x"]]), ("architectures", "LlamaForCausalLM" * 2), ("architectures", {"a": "b"}),
    ("quantization_config", {"x": ["y" * 1000] * 1000}), ("layer_types", ["x"] * 100_000), ("layer_types", 3),
    ("sliding_window", []), ("sliding_window", -1), ("hidden_act", ["silu"]), ("hidden_act", 5),
    ("attention_bias", "yes"), ("mlp_bias", 1), ("tie_word_embeddings", []),
    ("rope_parameters", []), ("rope_parameters", {"rope_type": "yarn", "factor": 2, "beta_slow": 5e-324}),
    ("rope_parameters", {"rope_type": "yarn", "factor": 2, "beta_fast": 1e31}),
    ("rope_parameters", {"rope_type": "yarn", "factor": 1e31}), ("rope_parameters", {"rope_type": {}}),
    ("rope_parameters", {"rope_type": "llama3", "factor": 2, "low_freq_factor": 0, "high_freq_factor": 0}),
    ("rope_parameters", {"rope_type": "linear", "factor": 0}), ("rope_parameters", {"rope_theta": 5e-324}),
    ("rope_parameters", {"rope_theta": [10000]}), ("rope_parameters", "x" * 1_000_000),
):
    changes = {key: value} | ({"architectures": ["MistralForCausalLM"]} if key == "sliding_window" else {})
    case(f"{CONFIG}: {key}: {value!r:.60}", edit(CONFIG, lambda c, changes=changes: c.update(changes)))
EXPERTS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
for name, key, value in (
    ("GptOss", "num_local_experts", 2**31 - 1), ("GptOss", "num_experts_per_tok", 2**31 - 1),
    ("GptOss", "num_local_experts", [5]), ("GptOss", "sliding_window", 2**31), ("GptOss", "swiglu_limit", "x"),
    ("Mixtral", "num_local_experts", 10**100), ("Mixtral", "num_local_experts", 2**31 - 1),
    ("Qwen3Moe", "mlp_only_layers", {"a": 1}), ("Qwen3Moe", "moe_intermediate_size", 2**31 - 1),
    ("Gemma2", "query_pre_attn_scalar", 1e31), ("Gemma2", "final_logit_softcapping", []),
    ("Gemma3", "sliding_window_pattern", -1), ("Gemma3", "rope_local_base_freq", "x"),
    ("Phi3", "rope_scaling", {"type": "longrope", "short_factor": [1.0] * 100_000}),
    ("Phi3", "rope_scaling", {"type": "longrope", "short_factor": ["x"] * 8, "long_factor": [1] * 8}),
    ("Phi3", "partial_rotary_factor", [1]),
    ("SmolLM3", "no_rope_layers", [1] * 100_000), ("SmolLM3", "no_rope_layer_interval", 0),
    ("Granite", "residual_multiplier", 0), ("Granite", "logits_scaling", -1e300), ("Olmo3", "layer_types", [[]] * 2),
):
    changes = {"architectures": [f"{name}ForCausalLM"], **EXPERTS, key: value}
    case(f"{CONFIG}: {name}, {key}: {value!r:.60}", edit(CONFIG, lambda c, changes=changes: c.update(changes)))

NORM = "model.norm.weight"
for kind, changes in {
    "dtype of ints": {"dtype": "I32"},
    "dtype of float8": {"dtype": "F8_E4M3"},
    "dtype null": {"dtype": None},
    "dtype of megabytes": {"dtype": "F" * 2_000_000},
    "shape of one more": {"shape": [65]},
    "shape in two dimensions": {"shape": [1, 64]},
    "shape negative": {"shape": [-64]},
    "shape of floats": {"shape": [64.0]},
    "shape of 2**62": {"shape": [2**62]},
    "shape of 2**64": {"shape": [2**64]},
    "shape with a zero": {"shape": [0, 2**40, 2**40]},
    "shape of a million dimensions": {"shape": [1] * 1_000_000},
    "shape nested": {"shape": [[64]]},
    "offsets swapped": {"data_offsets": [256, 0]},
    "offsets negative": {"data_offsets": [-256, 0]},
    "offsets of 2**63": {"data_offsets": [2**63, 2**63 + 256]},
    "offsets of 10**300": {"data_offsets": [10**300, 10**300 + 256]},
    "offsets at the start": {"data_offsets": [0, 256]},
    "offsets of floats": {"data_offsets": [0.0, 256.0]},
    "offsets of a million": {"data_offsets": [0] * 1_000_000},
    "offsets null": {"data_offsets": None},
    "another key": {"more": 1},
}.items():
    case(f"tensor: {kind}", tensors(lambda h, changes=changes: h[NORM].update(changes)))
case("tensor: missing", tensors(lambda h: h.pop(NORM) and None))
case("tensor: not an object", tensors(lambda h: h.update({NORM: [1]})))
case("tensor: megabytes of name", tensors(lambda h: {**h, "x" * 1_000_000: entry("F32", [0], 0, 0)}))
MORE = {str(i): entry("F32", [0], 0, 0) for i in range(30_000)}
case("tensors: thirty thousand more", tensors(lambda h: {**h, **MORE}))
case("tensors: none", tensors(lambda h: {}))
case("tensors: all in one place", tensors(lambda h: [t.update(data_offsets=[0, 4]) for t in h.values()] and None))
case("metadata: not strings", tensors(lambda h: h.update(__metadata__={"a": {}})))
case("metadata: a list", tensors(lambda h: h.update(__metadata__=[])))


def cut(size):
    def prepare(folder):
        content = (folder / SINGLE).read_bytes()
        (folder / SINGLE).write_bytes(content[:size])

    return prepare


for size in (0, 1, 7, 8, 9, 100, -1, -4, -1000):
    case(f"{SINGLE}: cut at {size}", cut(size))
case(f"{SINGLE}: a byte more", lambda f: (f / SINGLE).write_bytes((f / SINGLE).read_bytes() + b"\0"))


def terabytes(folder):
    """A sparse file of zeros with the size in its header, and a configuration that asks for all of it."""
    header, config = header_of(folder)[0], json.loads((folder / CONFIG).read_text())
    config.update(vocab_size=2**31 - 1)
    at = 0
    for found in header.values():
        if found["shape"][:1] == [256]:
            found["shape"][0] = 2**31 - 1
        size = int(np.prod(found["shape"], dtype=object)) * 4
        found.update(dtype="F32", data_offsets=[at, at + size])
        at += size
    (folder / CONFIG).write_text(json.dumps(config))
    raw = json.dumps(header).encode()
    sparse(SINGLE, 8 + len(raw) + at, len(raw).to_bytes(8, "little") + raw)(folder)


case(f"{SINGLE}: a sparse network of a terabyte", terabytes)


O_PROJ = "model.layers.1.self_attn.o_proj."
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


def packed(change=None, at=None, said=PACKED):
    """The network with one matrix in words of 4 bits; `change` its tensors, or the header of a sparse file `at` it."""

    def prepare(folder):
        edit(CONFIG, lambda content: content.update(quantization_config=said))(folder)
        checkpoint = Checkpoint(folder)
        arrays = {name: checkpoint.read(name) for name in checkpoint.names() if name != f"{O_PROJ}weight"}
        parts = {"weight_packed": np.zeros((64, 8), np.int32), "weight_scale": np.ones((64, 1), np.float16)}
        parts["weight_shape"] = np.array([64, 64])
        arrays |= {f"{O_PROJ}{name}": part for name, part in (parts | (change or {})).items() if part is not None}
        (folder / SINGLE).write_bytes(pack_arrays(arrays))
        if at is not None:
            header, data = header_of(folder)
            name, dtype, shape = at
            size = int(np.prod(shape, dtype=object)) * {"I32": 4, "F32": 4, "I8": 1}[dtype]
            header[O_PROJ + name] = entry(dtype, shape, len(data), len(data) + size)
            raw = pack(header, data)
            sparse(SINGLE, len(raw) + size, raw)(folder)

    return prepare


TERA = 2**40
for name, change in {
    "no scales": {"weight_scale": None}, "no shape": {"weight_shape": None},
    "a shape of zeros": {"weight_shape": np.array([0, 0])}, "a negative shape": {"weight_shape": np.array([-64, -64])},
    "a huge shape": {"weight_shape": np.array([64, 2**62])},
    "a shape of floats": {"weight_shape": np.ones(2, np.float32)},
    "words of floats": {"weight_packed": np.zeros((64, 8), np.float32)},
    "words in three axes": {"weight_packed": np.zeros((64, 4, 2), np.int32)},
    "words of no row": {"weight_packed": np.zeros((0, 8), np.int32)},
    "scales of no group": {"weight_scale": np.zeros((64, 0), np.float16)},
    "scales that are no numbers": {"weight_scale": np.full((64, 1), np.nan, np.float16)},
    "infinite scales": {"weight_scale": np.full((64, 1), 1e30, np.float32)},
    "zeros of another shape": {"weight_zero_point": np.zeros((3, 1), np.int32)},
    "an order of another size": {"weight_g_idx": np.zeros(3, np.int32)},
    "an order backwards": {"weight_g_idx": np.arange(64, dtype=np.int32)[::-1].copy()},
    "the matrix twice": {"weight": np.zeros((64, 64), np.float32)},
}.items():
    case(f"packed: {name}", packed(change))
for name, dtype, shape in (
    ("weight_packed", "I32", [64, TERA // 256]), ("weight_packed", "I32", [TERA // 32, 8]),
    ("weight_scale", "F32", [64, TERA // 256]), ("weight_zero_point", "I32", [8, TERA // 32]),
    ("weight_g_idx", "I32", [TERA // 4]), ("bias", "F32", [TERA // 4]), ("weight_shape", "I32", [TERA // 4]),
):
    case(f"packed: {name} of 1 TiB, {shape}", packed(at=(name, dtype, shape)))
case("packed: by a method that has no words", packed(said={"quant_method": "fp8"}))
for number, said in enumerate((
    [], "gptq", {"quant_method": "fp8", "weight_block_size": [2**70, 0]}, {"quant_method": {}},
    PACKED | {"config_groups": {"x" * 1_000_000: {"weights": {"block_structure": "x"}}}},
    PACKED | {"config_groups": {"a": {"weights": {"block_structure": [0.5, 1]}}}}, {"quant_method": "mxfp4"},
    {"quant_method": "gptq", "bits": 10**100}, {"quant_method": "gptq", "bits": True},
    {"quant_method": "gptq", "bits": 4, "group_size": 2**40}, {"quant_method": "awq", "bits": 4, "group_size": "x"},
    {"quant_method": "gptq", "bits": 4, "dynamic": {"x": 1}}, {"quant_method": "x" * 1_000_000},
)):
    change = edit(CONFIG, lambda c, said=said: c.update(quantization_config=said))
    case(f"{CONFIG}: quantised, {number}: {said!r:.60}", change)
for text in (None, [], "x", {"model_type": {}}, {"hidden_size": 2**70}, {"model_type": "x" * 1_000_000}, {"a": {}}):
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    case(f"{CONFIG}: text_config: {text!r:.60}", edit(CONFIG, lambda c, whole=whole: c.update(whole)))
for kind, content in {
    "empty": b"", "deep": DEEP, "a list": b"[]", "no vocabulary": b'{"config": {}}', "a number": b'{"config": 1}',
    "another pattern": b'{"config": {"pattern": "(a+)+$"}, "vocab": []}',
}.items():
    case(f"tekken.json: {kind}", replace("tekken.json", content))
case("tekken.json: sparse, 1 TiB", sparse("tekken.json", TERA))
case("tekken.json: a pipe", lambda folder: os.mkfifo(folder / "tekken.json"))


def weight_map(change):
    return sharded(edit(INDEX, lambda content: change(content["weight_map"])))


for shard in (
    "../model.safetensors", "/dev/zero", "a/b", "..", ".", "", "a\0b", "x" * 5000, "y" * 200, 7, None, [], {},
):
    case(f"index: shard {shard!r:.30}", weight_map(lambda m, s=shard: m.update({NORM: s})))
case("index: config.json as a shard", weight_map(lambda m: m.update({NORM: CONFIG})))
case("index: itself as a shard", weight_map(lambda m: m.update({NORM: INDEX})))
case("index: another shard", weight_map(lambda m: m.update({NORM: m["model.embed_tokens.weight"]})))
case("index: a tensor is not there", weight_map(lambda m: m.update({"x": m[NORM]})))
case("index: a tensor is left out", weight_map(lambda m: m.pop(NORM) and None))
case("index: nothing", weight_map(lambda m: m.clear()))
case("index: a list", sharded(edit(INDEX, lambda c: c.update(weight_map=[]))))
case("index: megabytes of a name", weight_map(lambda m: m.update({"x" * 5_000_000: m[NORM]})))


def many_shards(folder):
    files = {f"w{i}": f"{i}.safetensors" for i in range(3000)}
    for name, file in files.items():
        (folder / file).write_bytes(pack_arrays({name: np.zeros(1, np.float32)}))
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))


case("index: three thousand shards", sharded(many_shards))
for key, content in (("top_k", -(10**30)), ("top_p", "1"), ("temperature", 1e400), ("min_p", {}), ("do_sample", [])):
    case(f"generation: {key}", replace("generation_config.json", json.dumps({key: content}).encode()))
case("generation: megabytes", sparse("generation_config.json", 5 << 20))
case("template: no UTF-8", replace("chat_template.jinja", b"\xff"))
case("template: a pipe", lambda folder: os.mkfifo(folder / "chat_template.jinja"))
case("template: a megabyte too many", sparse("chat_template.jinja", 5 << 20))
case("template: a number", replace("tokenizer_config.json", b'{"chat_template": 1}'))
case("no files", lambda folder: [path.unlink() for path in folder.iterdir()])
case("no folder", shutil.rmtree)
case("a file instead of a folder", lambda folder: (shutil.rmtree(folder), folder.write_bytes(b"{}")))


def outcome(prepare, folder):
    """`(error, message)`: the class that ended it."""
    shutil.copytree(GOLDEN / "llama_biases", folder)
    prepare(folder)
    signal.alarm(SECONDS)
    try:
        engine = InferenceEngine.from_pretrained(folder)
        _ = engine.tokenizer, engine.chat_template
        found = "nothing", ""
    except Exception as error:
        found = type(error).__name__, str(error)
    finally:
        signal.alarm(0)
    if folder.is_dir():
        shutil.rmtree(folder)
    else:
        folder.unlink(missing_ok=True)
    return found


def main(folder):
    outcome(next(iter(CASES.values())), folder / "first")  # imports, threads
    limit_memory(ROOM)
    found = {}
    for name, prepare in CASES.items():
        found[name] = outcome(prepare, folder / "checkpoint")
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
