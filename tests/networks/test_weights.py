"""Checkpoint folders: shards, their index, and the tensors that a network requires."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from places import GOLDEN
from seeded_weights import seeded
from tensor_files import pack, pack_arrays

from kvcache.engine import InferenceEngine, ModelConfig, Transformer
from kvcache.errors import CheckpointError, OutOfMemoryError
from kvcache.networks import weights
from kvcache.networks.checkpoint import Checkpoint
from kvcache.networks.fingerprint import fingerprint
from kvcache.networks.safetensors import SafetensorsFile

pytestmark = pytest.mark.one_build


@pytest.fixture
def checkpoint(tmp_path):
    """A copy of a golden checkpoint that a test may damage: its folder, tensors, and a way to save them."""
    source = GOLDEN / "llama_biases"
    shutil.copy(source / "config.json", tmp_path)
    file = SafetensorsFile(source / "model.safetensors")
    tensors = {name: file.read(name).astype(np.float32) for name in file}

    def save():
        (tmp_path / "model.safetensors").write_bytes(pack_arrays(tensors))
        return tmp_path

    return tmp_path, tensors, save


def test_round_trip_in_another_dtype(checkpoint):
    _, tensors, save = checkpoint
    for name in list(tensors):
        tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)
    model, golden = Transformer.from_pretrained(save()), Transformer.from_pretrained(GOLDEN / "llama_biases")
    mine, theirs = (of.weights.layers[1].mlps[0].gate_up for of in (model, golden))
    assert (mine.format, theirs.format) == ("bf16", "bf16")
    np.testing.assert_array_equal(mine.to_float32(), theirs.to_float32())


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.k_proj.bias", "lm_head.weight", "model.norm.weight"])
def test_missing_tensor(checkpoint, name):
    _, tensors, save = checkpoint
    del tensors[name]
    with pytest.raises(CheckpointError, match=f"expected the tensors {name}, got none"):
        Transformer.from_pretrained(save())


def test_fewer_layers_than_the_files_have(tmp_path, checkpoint):
    """A network that is cut is another one; layers behind the last one may be MTP layers alone."""
    folder, tensors, save = checkpoint
    config = json.loads((folder / "config.json").read_text())
    assert config["num_hidden_layers"] == 3
    save()
    for count in (1, 2):
        (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": count}))
        message = f"num_hidden_layers: expected 3, the layers of the files, got {count}"
        with pytest.raises(CheckpointError, match=message):
            Transformer.from_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    tensors["hearing_model.encoder.layers.31.fc1.weight"] = tensors["model.norm.weight"]  # layers of something else
    with pytest.raises(CheckpointError, match=r"expected no others, got the tensors hearing_model\.encoder"):
        Transformer.from_pretrained(save())
    for name in ("deepseek_v3", "glm4_moe", "solar_open", "gemma4", "qwen3_5", "nemotron_h", "qwen3_vl_moe"):
        place = tmp_path / name
        shutil.copytree(seeded(name), place)
        config = json.loads((place / "config.json").read_text())
        of_texts = config.get("text_config", config)
        layers = of_texts.get("num_hidden_layers") or len(of_texts["layers_block_type"])
        of_texts["num_hidden_layers"] = layers - 1
        for key in ("layer_types", "layers_block_type", "mlp_layer_types"):
            if of_texts.get(key):
                of_texts[key] = of_texts[key][:-1]
        if "per_layer_config" in of_texts:
            of_texts["per_layer_config"].pop("7")
            of_texts["num_kv_shared_layers"] = 0
        (place / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=f"num_hidden_layers: expected {layers}, the layers of the files"):
            Transformer.from_pretrained(place)


def test_an_adapter_is_no_network(checkpoint):
    """Alone, and beside the network that it changes."""
    folder, _, save = checkpoint
    save()
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "meta-llama/Llama-3.1-8B"}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    message = r"adapter_config\.json: expected a network alone, got an adapter for 'meta-llama/Llama-3\.1-8B': load its"
    for call in (Transformer.from_pretrained, InferenceEngine.from_pretrained):
        with pytest.raises(CheckpointError, match=message):
            call(folder)
    (folder / "config.json").unlink()
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    for call in (Transformer.from_pretrained, InferenceEngine.from_pretrained):
        with pytest.raises(CheckpointError, match=message):
            call(folder)


def test_of_many_missing_tensors_a_few_are_named(checkpoint):
    _, tensors, save = checkpoint
    for name in list(tensors)[4:]:
        del tensors[name]
    with pytest.raises(CheckpointError, match=r"expected the tensors (\S+, ){3}\S+ and more, got none$"):
        Transformer.from_pretrained(save())


def test_billions_of_layers(checkpoint):
    folder, _, save = checkpoint
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2**31 - 1}))
    with pytest.raises(CheckpointError, match="num_hidden_layers: expected a positive whole number up to 65536"):
        Transformer.from_pretrained(save())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 65536}))
    with pytest.raises(CheckpointError, match=r"expected the tensors model.layers.3.*and more"):
        Transformer.from_pretrained(save())


def test_unexpected_tensor(checkpoint):
    """A bias that config.json does not mention would be ignored silently, and the text would be wrong."""
    _, tensors, save = checkpoint
    tensors["model.layers.0.self_attn.q_norm.weight"] = np.ones(8, np.float32)
    with pytest.raises(CheckpointError, match=r"no others, got the tensors model.layers.0.self_attn.q_norm.weight"):
        Transformer.from_pretrained(save())


def test_old_rope_buffers_are_ignored(checkpoint):
    _, tensors, save = checkpoint
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    Transformer.from_pretrained(save())


def test_a_head_beside_tied_weights(checkpoint, monkeypatch):
    """A second copy of the embedding is tied, as the configuration says; other values are a head of their own."""
    monkeypatch.setattr(weights, "_BAND_BYTES", 4 * 64 * 100)  # several bands, the last a part of one
    folder, tensors, save = checkpoint
    untied = computed(Transformer.from_pretrained(save()))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    model = Transformer.from_pretrained(save())
    assert model.weights.head is not model.weights.embedding
    np.testing.assert_array_equal(computed(model), untied)
    copy = tensors["model.embed_tokens.weight"].copy()
    tensors["lm_head.weight"] = copy
    model = Transformer.from_pretrained(save())
    assert model.weights.head is model.weights.embedding
    copy[-1, -1] += 1
    assert Transformer.from_pretrained(save()).weights.head.to_float32()[-1, -1] == copy[-1, -1]
    tensors["lm_head.weight"] = copy[:-1]
    with pytest.raises(CheckpointError, match=r"lm_head.weight: expected shape \(256, 64\), got \(255, 64\)"):
        Transformer.from_pretrained(save())


def test_wrong_shape(checkpoint):
    _, tensors, save = checkpoint
    name = "model.layers.2.mlp.down_proj.weight"
    tensors[name] = np.ascontiguousarray(tensors[name].T)
    with pytest.raises(CheckpointError, match=r"down_proj.weight: expected shape \(64, 112\), got \(112, 64\)"):
        Transformer.from_pretrained(save())


def test_wrong_dtype(checkpoint):
    folder, _, save = checkpoint
    content = save().joinpath("model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["model.norm.weight"]["dtype"] = "I32"
    (folder / "model.safetensors").write_bytes(pack(header, content[8 + length :]))
    with pytest.raises(CheckpointError, match=r"model.norm.weight: expected F32, F16 or BF16, got I32"):
        Transformer.from_pretrained(folder)


def test_nothing_is_allocated_for_a_bad_checkpoint(checkpoint, monkeypatch):
    """Wrong sizes in config.json must be detected before matrices of these sizes are allocated."""
    folder, _, save = checkpoint
    config = json.loads((folder / "config.json").read_text())
    config.update(intermediate_size=2**30, vocab_size=2**30)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="expected shape"):
        Transformer.from_pretrained(save())


def test_no_weights(tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(FileNotFoundError, match=r"model.safetensors.*pytorch_model.bin cannot be read"):
        Checkpoint(tmp_path)


def test_no_directory(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config.json"):
        Transformer.from_pretrained(tmp_path / "nowhere")


@pytest.fixture
def shards(tmp_path):
    shutil.copytree(GOLDEN / "llama_linear_tied_sharded_f16", tmp_path, dirs_exist_ok=True)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    return tmp_path, content["weight_map"], lambda: index.write_text(json.dumps(content))


def test_missing_shard_is_named(shards):
    folder, _, _ = shards
    (folder / "model-00003-of-00005.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00003-of-00005"):
        Transformer.from_pretrained(folder)


@pytest.mark.parametrize(
    "shard", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\\b", "a\0b", 7, None]
)
def test_index_cannot_leave_its_directory(shards, shard):
    folder, weight_map, save = shards
    weight_map["model.norm.weight"] = shard
    save()
    with pytest.raises(CheckpointError, match=r"model.norm.weight: expected the name of a file"):
        Transformer.from_pretrained(folder)


def test_index_names_the_wrong_shard(shards):
    folder, weight_map, save = shards
    weight_map["model.norm.weight"] = weight_map["model.embed_tokens.weight"]
    save()
    with pytest.raises(CheckpointError, match=r"expected the tensor model.norm.weight"):
        Transformer.from_pretrained(folder)


def test_index_lacks_a_tensor(shards):
    folder, weight_map, save = shards
    del weight_map["model.norm.weight"]
    save()
    with pytest.raises(CheckpointError, match="expected tensors that the index lists"):
        Transformer.from_pretrained(folder)


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "{", ""])
def test_damaged_index(shards, content):
    folder, _, _ = shards
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"index.json"):
        Transformer.from_pretrained(folder)


def test_truncated_shard(shards):
    folder, weight_map, _ = shards
    path = folder / weight_map["model.norm.weight"]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rf"{path.name}: expected .*truncated"):
        Transformer.from_pretrained(folder)


def computed(model):
    """The logits of a text, which depend on every weight."""
    engine = InferenceEngine(model)
    return engine.prefill_from_pos(np.arange(40, dtype=np.uint32), 0)


@pytest.mark.parametrize("source", ["llama_biases", "llama_linear_tied_sharded_f16", "llama_llama3_bf16", "qwen3_tied"])
def test_no_change_of_a_file_reaches_a_network(tmp_path, source):
    """The weights are private memory: after the load no file is mapped or open."""
    shutil.copytree(GOLDEN / source, tmp_path, dirs_exist_ok=True)
    model = Transformer.from_pretrained(tmp_path)
    want = computed(model)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    opened = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    assert not [name for name in opened if name.startswith(str(tmp_path))]
    for path in tmp_path.iterdir():
        size = path.stat().st_size
        with path.open("r+b") as file:  # writes to the same inode, as `cp` does
            file.write(b"\xff" * size)
        np.testing.assert_array_equal(computed(model), want)
        os.truncate(path, 0)
        np.testing.assert_array_equal(computed(model), want)


@pytest.mark.parametrize("source", ["llama", "llama_biases", "qwen3_tied"])
def test_weights_are_read_only(source):
    every = Transformer.from_pretrained(GOLDEN / source).weights.arrays()
    arrays = [array for array in every if isinstance(array, np.ndarray)]
    assert len(arrays) >= 5
    assert not any(array.flags.writeable for array in arrays)
    with pytest.raises(ValueError, match="read-only"):
        arrays[0][0] = 1


def test_a_shard_that_is_cut_short_while_it_is_read(shards, monkeypatch):
    folder, weight_map, _ = shards
    shard = weight_map["model.norm.weight"]
    rows = SafetensorsFile.rows

    def cut(self, *arguments):
        os.truncate(folder / shard, 100)
        return rows(self, *arguments)

    monkeypatch.setattr(SafetensorsFile, "rows", cut)
    with pytest.raises(CheckpointError, match=rf"{shard}: model\.\S+: expected \d+ bytes at \d+, got a truncated file"):
        Transformer.from_pretrained(folder)


def test_weights_without_memory(checkpoint, monkeypatch):
    _, _, save = checkpoint

    def refuse(*_):
        raise MemoryError

    monkeypatch.setattr(weights, "empty_matrices", refuse)
    with pytest.raises(OutOfMemoryError, match="bytes"):
        Transformer.from_pretrained(save())


def test_every_golden_tensor_is_used():
    """The shapes that a network requires add up to the contents of the files."""
    for folder in GOLDEN.glob("*/golden.npz"):
        model = Transformer.from_pretrained(folder.parent)
        config = ModelConfig.from_pretrained(folder.parent)
        stored = sum(
            math.prod(file[name].shape)
            for file in map(SafetensorsFile, folder.parent.glob("*.safetensors"))
            for name in file
        )
        found = model.weights
        arrays = [found.embedding, found.norm] + ([] if config.tie_word_embeddings else [found.head])
        for layer in found.layers:
            arrays += [array for array in layer.arrays() if array is not layer.qk_norm]
            if config.qk_norm == "head":
                arrays += [layer.qk_norm[0], layer.qk_norm[-1]]
            else:
                arrays.append(layer.qk_norm)
        assert sum(math.prod(array.shape) for array in arrays if array is not None) == stored


@pytest.mark.parametrize(
    ("weights", "layers", "head"),
    [
        ("auto", "bf16", "bf16"), ("f32", "f32", "f32"), ("f16", "f16", "f16"), ("bf16", "bf16", "bf16"),
        ("q8", "q8_0", "q8_0"), ("q4", "q4_1", "q8_0"),
    ],
)
def test_formats(weights, layers, head):
    """Every matrix has the format that was asked for, and the network's result is near that of the stored weights."""
    exact = InferenceEngine.from_pretrained(GOLDEN / "llama_biases")
    engine = InferenceEngine.from_pretrained(GOLDEN / "llama_biases", weights=weights, activations="exact")
    found = engine.model.weights
    assert {found.head.format, found.embedding.format} == {head}
    matrices = [m for layer in found.layers for m in layer.arrays() if m is not None and not isinstance(m, np.ndarray)]
    assert len(matrices) == 4 * len(found.layers)
    assert {matrix.format for matrix in matrices} == {layers}
    prompt = np.arange(3, 40)
    mine, stored = engine.prefill_from_pos(prompt, 0), exact.prefill_from_pos(prompt, 0)
    near = {"auto": 0.0, "f32": 1e-5, "f16": 1e-2, "bf16": 0.0, "q8": 0.05, "q4": 0.6}[weights]
    assert np.abs(mine - stored).max() <= near * np.abs(stored).max()


def test_unknown_formats_and_activations():
    with pytest.raises(ValueError, match="weights: expected one of auto, f32, f16, bf16, q8, q4, got 'int4'"):
        InferenceEngine.from_pretrained(GOLDEN / "llama", weights="int4")
    with pytest.raises(ValueError, match="activations: expected one of int8, exact, bf16, got 'int4'"):
        InferenceEngine.from_pretrained(GOLDEN / "llama", activations="int4")


def test_a_mixed_checkpoint_keeps_each_dtype(checkpoint):
    """Matrices that are stacked but stored differently become parts of one stack, bit for bit."""
    _, tensors, save = checkpoint
    name = "model.layers.0.self_attn.v_proj.weight"
    tensors[name] = tensors[name].astype(np.float16)
    model = Transformer.from_pretrained(save())
    qkv = model.weights.layers[0].qkv
    assert qkv.format == "f32+f16"
    np.testing.assert_array_equal(qkv.to_float32()[-len(tensors[name]) :], tensors[name].astype(np.float32))
    whole = Transformer.from_pretrained(save(), weights="f32").weights.layers[0].qkv
    x = np.random.default_rng(0).standard_normal((3, qkv.shape[1])).astype(np.float32)
    np.testing.assert_array_equal(qkv.multiply(x), whole.multiply(x))


@pytest.mark.parametrize("weights", ["f16", "q8", "q4"])
def test_weights_that_a_format_cannot_hold(checkpoint, weights):
    _, tensors, save = checkpoint
    name = "model.layers.0.mlp.down_proj.weight"
    for value in (np.nan, np.inf, 1e6):
        tensors[name][3, 5] = value
        with pytest.raises(CheckpointError, match=f"{name}: values: expected finite numbers up to 65504, got"):
            Transformer.from_pretrained(save(), weights=weights)


def test_memory_and_progress():
    """The bytes that `memory` says are those of the matrices; loading reports all of them, in order."""
    steps = []
    engine = InferenceEngine.from_pretrained(GOLDEN / "llama", weights="q8", progress=lambda *step: steps.append(step))
    assert steps == sorted(steps)
    assert steps[-1][0] == steps[-1][1]
    vectors = sum(array.nbytes for array in engine.model.weights.arrays() if isinstance(array, np.ndarray))
    assert 0 <= engine.memory()["weights"] - vectors <= steps[-1][1]
    half = InferenceEngine.from_pretrained(GOLDEN / "llama", weights="f32").memory()["weights"]
    assert engine.memory()["weights"] < half / 2


@pytest.mark.exhaustive
def test_loading_takes_little_more_than_the_result(tmp_path):
    """The most memory that loading takes, in a process of its own, for a network whose f32 weights take 59 MB."""
    script = f"""
import resource, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from bench.support.checkpoints import Size, write_checkpoint
from kvcache.engine import Transformer
folder = write_checkpoint(Size(512, 4, 8, 4, 1376, 8192), Path({str(tmp_path)!r}))
import gc
gc.collect()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = Transformer.from_pretrained(folder, weights={{weights!r}})
print(before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, model.weights.nbytes)
"""
    for chosen in ("f32", "q8"):
        code = script.replace("{weights!r}", repr(chosen))
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        before, after, size = map(int, done.stdout.split())
        assert (after - before) * 1024 < 1.2 * size + (8 << 20), (before, after, size)


def test_the_name_of_a_model_knows_its_packed_weights():
    """Floats have one name however they are kept; packed weights and what meets them have others."""

    def name(**options):
        return fingerprint(Transformer.from_pretrained(GOLDEN / "llama_biases", **options))

    assert name() == name(weights="f32") == name(weights="bf16") == name(activations="exact")
    others = {name(weights=w, activations=a) for w in ("q8", "q4") for a in ("int8", "exact")}
    others |= {name(activations="bf16", weights=weights) for weights in ("bf16", "f16", "f32", "q8", "q4")}
    assert len(others | {name()}) == 10
