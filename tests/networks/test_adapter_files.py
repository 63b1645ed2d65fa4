"""Adapters in folders: the matrices that peft would add, and false folders."""

from __future__ import annotations

import json
import math
import os
import re
import shutil

import ml_dtypes
import numpy as np
import pytest
from hostile import checkpoints as hostile_checkpoints
from peft_folders import CONFIG, TENSORS, adapter_arrays, modules_of, settings_of, write_adapter
from seeded_weights import golden_folder
from tensor_files import pack_arrays

from kvcache import InferenceEngine
from kvcache.errors import CheckpointError
from kvcache.networks.adapter import PROJECTIONS, adapted_shapes
from kvcache.networks.adapter_files import read_adapter
from kvcache.networks.checkpoint import Checkpoint
from kvcache.networks.config import ModelConfig
from kvcache.networks.folder import FolderTensors
from kvcache.networks.folder_places import FolderPlaces
from kvcache.networks.safetensors import SafetensorsFile

pytestmark = pytest.mark.one_build
NETWORKS = ("llama", "phi3_longrope", "cohere", "glm", "gemma3n", "falcon_h1", "qwen3_moe")
# Matrices of one file, and of fused and paired ones, and rows in the order of another rotary embedding.
Q = "model.layers.0.self_attn.q_proj"


def config_of(name):
    return ModelConfig.from_pretrained(golden_folder(name))


def product(matrices):
    """The matrix that is added, in float64."""
    a, b = (each.view(ml_dtypes.bfloat16) if each.dtype.names else each for each in (matrices.a, matrices.b))
    return matrices.scale * b.astype(np.float64) @ a.astype(np.float64)


def merged(name, modules, adapter, folder):
    """Write a network into whose tensors the products of an adapter of rank 3 are added."""
    write_adapter(adapter, modules, rank=3, target_modules=[*modules])
    tensors, checkpoint, found = adapter_arrays(modules, rank=3), Checkpoint(golden_folder(name)), {}
    for tensor in checkpoint.names():
        found[tensor] = checkpoint.read(tensor)
        if (path := tensor.removesuffix(".weight")) in modules:
            a, b = (tensors[f"base_model.model.{path}.lora_{side}.weight"] for side in "AB")
            found[tensor] = found[tensor] + np.float32(2) * b @ a
    (folder / "model.safetensors").write_bytes(pack_arrays(found))
    shutil.copy(golden_folder(name) / "config.json", folder)


@pytest.mark.parametrize("name", ["falcon_h1", "gemma4", "llama4", "minicpm", "qwen3_next", "step3p5"])
def test_a_network_beside_an_adapter_is_the_merged_network(tmp_path, name):
    """Families that scale, gate, cap or share what their projections give: log-probabilities are those of the sum."""
    config = config_of(name)
    places = FolderPlaces(config, (checkpoint := Checkpoint(golden_folder(name))).__contains__, checkpoint.shape)
    tensors = [f"model.layers.{layer}.{PROJECTIONS[part]}.weight" for layer, part in adapted_shapes(config)]
    files = [places.place(tensor).name for tensor in tensors]
    modules = {file.removesuffix(".weight"): checkpoint.shape(file) for file in files}
    merged(name, modules, tmp_path / "adapter", tmp_path)
    exact = {"weights": "f32", "activations": "exact"}
    beside = InferenceEngine.from_pretrained(golden_folder(name), adapters={"x": tmp_path / "adapter"}, **exact)
    whole = InferenceEngine.from_pretrained(tmp_path, **exact)
    tokens = np.arange(3, 40) % config.vocab_size
    want = whole.score(tokens)
    np.testing.assert_allclose(beside.score(tokens, adapter="x"), want, atol=5e-4)
    assert np.abs(beside.score(tokens) - want).max() > 1


@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_added_is_what_a_merged_checkpoint_has_more(tmp_path, name):
    """A checkpoint into whose tensors the products are added, read as any other one, has just these more."""
    config = config_of(name)
    merged(name, modules_of(name), tmp_path / "adapter", tmp_path)
    before, after = (FolderTensors(Checkpoint(each), config) for each in (golden_folder(name), tmp_path))
    found = read_adapter(tmp_path / "adapter", config)
    assert found.name == "adapter"
    assert found.matrices.keys() == adapted_shapes(config).keys()
    for (layer, part), (rows, _) in adapted_shapes(config).items():
        tensor = f"model.layers.{layer}.{PROJECTIONS[part]}.weight"
        more = after.rows(tensor, 0, rows).to_float32() - before.rows(tensor, 0, rows).to_float32()
        np.testing.assert_allclose(product(found.matrices[layer, part]), more, atol=1e-5)


def test_ranks_and_factors(tmp_path):
    """The first pattern that matches the end of a path counts; rsLoRA divides by the root of the rank."""
    config, modules = config_of("llama"), modules_of("llama")
    ranks = {"model.layers.0.mlp.up_proj": 2, r"layers\.1\..*": 5, "self_attn.o_proj": 3}
    alphas = {"mlp.up_proj": 8.5, r"layers\.[01]\.self_attn\.\w+_proj": 12}

    def rank_of(path):
        first, number, rest = path.partition("layers.")[2].partition(".")
        return 2 if path.endswith("0.mlp.up_proj") else 5 if first == "1" else 3 if rest.endswith("o_proj") else 4

    def alpha_of(path):
        return 8.5 if path.endswith("up_proj") else 12 if re.search(r"layers\.[01]\.self_attn", path) else 6

    arrays = adapter_arrays(modules, rank_of)
    for by_root in (False, True):
        folder = write_adapter(
            tmp_path / "a", modules, arrays=arrays, rank_pattern=ranks, alpha_pattern=alphas, use_rslora=by_root
        )
        found = read_adapter(folder, config)
        for (layer, part), each in found.matrices.items():
            path = f"model.layers.{layer}.{PROJECTIONS[part]}"
            assert each.rank == rank_of(path)
            assert each.scale == alpha_of(path) / (math.sqrt(each.rank) if by_root else each.rank)


def test_types_and_names_of_tensors(tmp_path):
    """Numbers are kept in the type of the file; names may say the adapter's name, and a file has no prefix."""
    config, modules = config_of("llama"), modules_of("llama", ("q_proj", "down_proj"))
    exact = adapter_arrays(modules, dtype=ml_dtypes.bfloat16)
    digests = set()
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        arrays = {name: each.astype(dtype) for name, each in exact.items()}
        folder = write_adapter(tmp_path / "a", modules, arrays=arrays)
        found = read_adapter(folder, config, "mine")
        assert found.name == "mine"
        q = found.matrices[0, "q"]
        assert q.a.dtype.itemsize == np.dtype(dtype).itemsize
        want = exact[f"base_model.model.{Q}.lora_B.weight"].astype(np.float64) @ exact[
            f"base_model.model.{Q}.lora_A.weight"].astype(np.float64)
        np.testing.assert_allclose(product(q), 1.5 * want, atol=1e-3 if dtype == np.float16 else 1e-9)
        digests.add(found.digest)
        model = "base_model.model.model."
        for old, new in (
            ("base_model.model.", ""), (".weight", ".default.weight"), (model, f"{model}language_model."),
            (model, "base_model.model.language_model.model."), (model, "base_model.model."),
        ):
            renamed = {name.replace(old, new): each for name, each in arrays.items()}
            renamed["base_model.model.model.vision_tower.q_proj.lora_A.weight"] = arrays[next(iter(arrays))]
            assert read_adapter(write_adapter(tmp_path / "a", modules, arrays=renamed), config).digest == found.digest
    assert len(digests) == 3
    mixed = {name: each.astype(np.float16 if "lora_B" in name else np.float32) for name, each in exact.items()}
    found = read_adapter(write_adapter(tmp_path / "a", modules, arrays=mixed), config)
    assert found.matrices[0, "q"].b.dtype == np.float32


def test_targets(tmp_path):
    """Lists of ends, patterns of whole paths, some layers, exclusions: the file has the modules that they name."""
    config = config_of("llama")
    every = modules_of("llama")
    cases = (
        ({"target_modules": "all-linear"}, ".*"),
        ({"target_modules": r".*\.(q|v)_proj"}, r".*\.(q|v)_proj"),
        ({"target_modules": ["q_proj", "mlp.down_proj"]}, r".*(q_proj|down_proj)"),
        ({"target_modules": [Q]}, re.escape(Q)),
        ({"target_modules": ["q_proj", "o_proj"], "exclude_modules": ["layers.0.self_attn.q_proj"]},
         r".*(o_proj|[1-9]\.self_attn\.q_proj)"),
        ({"target_modules": ["q_proj", "o_proj"], "exclude_modules": r".*q_proj"}, r".*o_proj"),
        ({"target_modules": ["k_proj"], "layers_to_transform": [1]}, r".*\.1\..*k_proj"),
        ({"target_modules": ["k_proj"], "layers_to_transform": 1, "layers_pattern": "layers"}, r".*\.1\..*k_proj"),
        ({"target_modules": ["k_proj"], "layers_to_transform": [0], "layers_pattern": ["h", "layers"]}, r".*0\..*k_.*"),
        ({"target_modules": r"((.*)*)*k_proj"}, r".*k_proj"),  # a search for it might never end
    )
    for settings, pattern in cases:
        modules = {path: shape for path, shape in every.items() if re.fullmatch(pattern, path)}
        found = read_adapter(write_adapter(tmp_path / "a", modules, **settings), config)
        assert len(found.matrices) == len(modules) > 0
    for settings, pattern in cases[1:-1]:
        modules = {path: shape for path, shape in every.items() if re.fullmatch(pattern, path)}
        others = {path: shape for path, shape in every.items() if path not in modules}
        more = modules | dict([next(iter(others.items()))])
        with pytest.raises(CheckpointError, match="expected a module that target_modules names, got another"):
            read_adapter(write_adapter(tmp_path / "a", more, **settings), config)
    less = {path: shape for path, shape in every.items() if "layers.1.mlp.up_proj" not in path}
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj: expected matrices of a module that target"):
        read_adapter(write_adapter(tmp_path / "a", less), config)


def test_invocation_tokens(tmp_path):
    config, modules = config_of("llama"), modules_of("llama", ("q_proj",))
    found = read_adapter(write_adapter(tmp_path / "a", modules, alora_invocation_tokens=[5, 7]), config)
    assert found.invocation_tokens == (5, 7)
    assert read_adapter(write_adapter(tmp_path / "a", modules), config).invocation_tokens is None
    for tokens in ([], [-1], [config.vocab_size], ["5"], [5.0], [True], "5", {"5": 7}, [2**70]):
        with pytest.raises(CheckpointError, match="invocation_tokens: expected"):
            read_adapter(write_adapter(tmp_path / "a", modules, alora_invocation_tokens=tokens), config)


# Settings, and the name that their message begins with.
REFUSED = [
    ({"peft_type": "IA3"}, "peft_type"), ({"peft_type": None}, "peft_type"), ({"peft_type": ["LORA"]}, "peft_type"),
    ({"bias": "all"}, "bias"), ({"bias": "lora_only"}, "bias"), ({"use_dora": True}, "use_dora"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"), ({"lora_bias": True}, "lora_bias"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
    ({"layer_replication": [[0, 1]]}, "layer_replication"), ({"use_qalora": True}, "use_qalora"),
    ({"arrow_config": {"top_k": 1}}, "arrow_config"), ({"a_setting_of_tomorrow": 1}, "a_setting_of_tomorrow"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"), ({"init_lora_weights": [1]}, "init_lora_weights"),
    ({"use_rslora": 1}, "use_rslora"), ({"fan_in_fan_out": "no"}, "fan_in_fan_out"),
    *(({"r": value}, "r") for value in (0, -1, 1.5, True, "4", None, 10**300, [4])),
    *(({"lora_alpha": value}, "lora_alpha") for value in ("6", None, True, 10**399, [], {})),
    *(({"rank_pattern": value}, "rank_pattern") for value in ([1], "q", {"q_proj": 0}, {"q_proj": 1.5}, {"(": 4}, 3)),
    ({"rank_pattern": {"(a+)+": 4}}, "rank_pattern"), ({"rank_pattern": {"x)|(y": 4}}, "rank_pattern"),
    ({"rank_pattern": {".*.*.*.*": 4}}, "rank_pattern"), ({"rank_pattern": {f"{i}.*.*": 4 for i in range(99)}}, "rank"),
    ({"rank_pattern": {"x" * 2000: 4}}, "rank_pattern"), ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern"),
    ({"alpha_pattern": {"q_proj": 10**399}}, "alpha_pattern"), ({"exclude_modules": "(.*)*x"}, "exclude_modules"),
    ({"target_modules": {"q_proj": 1}}, "target_modules"), ({"target_modules": [1]}, "target_modules"),
    ({"target_modules": "("}, "target_modules"), ({"layers_to_transform": ["0"]}, "layers_to_transform"),
    ({"layers_to_transform": "0"}, "layers_to_transform"), ({"layers_to_transform": [-1]}, "layers_to_transform"),
    ({"layers_pattern": {"a": 1}}, "layers_pattern"), ({"layers_pattern": [3]}, "layers_pattern"),
    ({"layers_pattern": "(a*)*"}, "layers_pattern"),
]


def test_settings_that_are_refused(tmp_path):
    config, modules = config_of("llama"), modules_of("llama", ("q_proj",))
    for settings, name in REFUSED:
        folder = write_adapter(tmp_path / "a", modules, **settings)
        with pytest.raises(CheckpointError, match=rf"adapter_config\.json: {name}[\w.({{+*)|]*: expected"):
            read_adapter(folder, config)
    without = settings_of(modules)
    for name in ("peft_type", "r", "lora_alpha"):
        (folder / CONFIG).write_text(json.dumps({key: value for key, value in without.items() if key != name}))
        with pytest.raises(CheckpointError, match=rf"adapter_config\.json: {name}: expected"):
            read_adapter(folder, config)


def test_neutral_values_of_unknown_settings(tmp_path):
    config, modules = config_of("llama"), modules_of("llama", ("q_proj",))
    neutral = {"of_tomorrow": None, "a_flag": False, "a_list": [], "an_object": {}, "a_text": ""}
    neutral |= {"init_lora_weights": "gaussian", "loftq_config": {"bits": 4}, "eva_config": {"rho": 2}, "bias": None}
    assert read_adapter(write_adapter(tmp_path / "a", modules, **neutral), config).matrices


def edited(arrays, change):
    found = dict(arrays)
    change(found)
    return found


def test_tensors_that_are_refused(tmp_path):
    """Other networks, layers that are not there, halves of modules, numbers that are none: each by its name."""
    config, modules = config_of("llama"), modules_of("llama", ("q_proj",))
    arrays = adapter_arrays(modules)
    a, b = (f"base_model.model.{Q}.lora_{side}.weight" for side in "AB")
    layers = config.num_layers
    behind = {path.replace("layers.0.", f"layers.{layers}."): shape for path, shape in modules.items()} | modules
    cases = (
        (lambda t: t.pop(a), "self_attn.q_proj: expected lora_A and lora_B, got no lora_A"),
        (lambda t: t.pop(b), "self_attn.q_proj: expected lora_A and lora_B, got no lora_B"),
        (lambda t: t.update({a: t[a][:3]}), "lora_A.weight: expected rank 4, as adapter_config.json says, got 3"),
        (lambda t: t.update({b: t[b][:, :3]}), "lora_B.weight: expected rank 4, as adapter_config.json says, got 3"),
        (lambda t: t.update({a: t[a][:, :-1]}), "lora_A.weight: expected shape (4, 64), got (4, 63)"),
        (lambda t: t.update({b: t[b][:-1]}), "lora_B.weight: expected shape"),
        (lambda t: t.update({b: t[b].reshape(-1)}), "lora_B.weight: expected shape"),
        (lambda t: t.update({a: t[a][None]}), "lora_A.weight: expected shape"),
        (lambda t: t.update({a: t[a].astype(np.int32)}), "lora_A.weight: expected F32, F16, BF16, got I32"),
        (lambda t: t.update(adapter_arrays(behind)), f"layers.{layers}.self_attn.q_proj: expected one of {layers} la"),
        (lambda t: t.update({"base_model.model.lm_head.lora_A.weight": t[a]}), "lm_head.lora_A.weight: expected lora_"),
        (lambda t: t.update({f"base_model.model.{Q}.lora_magnitude_vector": t[a]}), "magnitude_vector: expected lora_"),
        (lambda t: t.update({f"base_model.model.{Q}.weight": t[a]}), "q_proj.weight: expected lora_A.weight or lora_B"),
        (lambda t: t.update({f"{Q}.lora_A.weight": t[a]}), "expected each matrix of a module once, got two"),
        (lambda t: t.update({a.replace(".weight", ".default.weight"): t[a]}), "expected each matrix of a module once"),
        (lambda t: t.clear(), "matrices: expected those of a projection or more, got none"),
    )
    for number in (np.nan, np.inf, -np.inf):
        for name in (a, b):
            bad = arrays[name].copy()
            bad[-1, -1] = number
            cases += ((lambda t, name=name, bad=bad: t.update({name: bad}), "expected finite numbers"),)
    for change, message in cases:
        folder = write_adapter(tmp_path / "a", modules, arrays=edited(arrays, change))
        with pytest.raises(CheckpointError, match=re.escape(message)):
            read_adapter(folder, config)
    others = (  # of more layers, of other modules
        ("llama_biases", "expected one of 2 layers"), ("smollm3", "expected one of 2 layers"),
        ("phi3_longrope", "expected mlp.down_proj or mlp.gate_proj"),
    )
    for other, message in others:
        with pytest.raises(CheckpointError, match=message):
            read_adapter(write_adapter(tmp_path / "a", modules_of(other)), config)
    with pytest.raises(CheckpointError, match=r"expected shape \(4, 64\), got \(4, 32\)"):
        read_adapter(write_adapter(tmp_path / "a", {Q: (64, 32)}, target_modules=[Q]), config)
    with pytest.raises(CheckpointError, match=r"2\.self_attn\.q_proj: expected matrices of a module that targ"):
        read_adapter(write_adapter(tmp_path / "a", modules), config_of("smollm3"))
    experts = {"model.layers.0.mlp.experts.0.w1": (4, 4)}
    folder = write_adapter(tmp_path / "a", experts, target_modules=["w1"])
    with pytest.raises(CheckpointError, match=r"experts\.0\.w1: expected .*self_attn\.k_proj.*, got mlp\.experts"):
        read_adapter(folder, config_of("mixtral"))


def test_numbers_that_no_type_holds(tmp_path):
    """Alpha may be any number, but its quotient by the rank is one of float32: with an infinite one all is nan."""
    config, modules = config_of("llama"), modules_of("llama", ("q_proj",))
    found = read_adapter(write_adapter(tmp_path / "a", modules, lora_alpha=1e39), config)
    assert found.matrices[0, "q"].scale == 1e39 / 4
    with pytest.raises(CheckpointError, match=r"0\.q\.scale: expected a finite number that f32 can hold, got 2\.5"):
        read_adapter(write_adapter(tmp_path / "b", modules, lora_alpha=1e308), config)


def test_files_that_are_not_there(tmp_path):
    config, modules = config_of("llama"), modules_of("llama", ("q_proj",))
    with pytest.raises(FileNotFoundError, match=r"adapter_config\.json"):
        read_adapter(tmp_path / "none", config)
    folder = write_adapter(tmp_path / "a", modules)
    (folder / TENSORS).rename(folder / "adapter_model.bin")
    with pytest.raises(FileNotFoundError, match=r"expected adapter_model\.safetensors, found adapter_model\.bin, "):
        read_adapter(folder, config)
    (folder / "adapter_model.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"adapter_model\.safetensors"):
        read_adapter(folder, config)


@pytest.mark.parametrize("name", [CONFIG, TENSORS])
@pytest.mark.parametrize("way", ["written", "replaced", "removed"])
def test_a_file_that_changes_while_it_is_read(tmp_path, monkeypatch, name, way):
    config, modules = config_of("llama"), modules_of("llama", ("q_proj", "o_proj"))
    folder, other = write_adapter(tmp_path / "a", modules), write_adapter(tmp_path / "b", modules, seed=1, lora_alpha=9)
    os.utime(folder / TENSORS, (1, 1))
    rows, reads = SafetensorsFile.rows, []

    def changing(self, *args):
        reads.append(args)
        if len(reads) == 3:
            if way == "written":
                (folder / name).write_bytes((other / name).read_bytes())
            elif way == "replaced":
                shutil.copy(other / name, tmp_path / "new")
                os.replace(tmp_path / "new", folder / name)
            else:
                (folder / name).unlink()
        return rows(self, *args)

    before = read_adapter(folder, config).digest
    monkeypatch.setattr(SafetensorsFile, "rows", changing)
    with pytest.raises((CheckpointError, FileNotFoundError), match="expected"):
        read_adapter(folder, config)
    monkeypatch.undo()
    if way != "removed":
        assert read_adapter(folder, config).digest != before


def test_an_adapter_is_its_own_after_it_was_read(tmp_path):
    config, modules = config_of("llama"), modules_of("llama")
    found = read_adapter(write_adapter(tmp_path / "a", modules), config)
    before = product(found.matrices[1, "o"])
    other = read_adapter(write_adapter(tmp_path / "a", modules, seed=1), config)
    np.testing.assert_array_equal(product(found.matrices[1, "o"]), before)
    assert other.digest != found.digest == read_adapter(write_adapter(tmp_path / "a", modules), config).digest


def test_hostile_files(tmp_path):
    """FIFOs, devices, deep and endless JSON, sparse files: each is refused, with the name of the file."""
    config, modules = config_of("llama"), modules_of("llama", ("q_proj",))
    kinds = {f"{kind}, {name}": hostile_checkpoints.special(name, make)
             for kind, make in hostile_checkpoints.SPECIAL.items() for name in (CONFIG, TENSORS)}
    for kind, content in hostile_checkpoints.JSON.items():
        kinds[f"{kind}, config"] = hostile_checkpoints.replace(CONFIG, content)
        kinds[f"{kind}, header"] = hostile_checkpoints.replace(TENSORS, hostile_checkpoints.pack(content))
    for name in (CONFIG, TENSORS):
        kinds[f"sparse, {name}"] = hostile_checkpoints.sparse(name, 2**40)
        kinds[f"empty, {name}"] = hostile_checkpoints.sparse(name, 0)
    for kind, prepare in kinds.items():
        shutil.rmtree(tmp_path / "a", ignore_errors=True)
        prepare(folder := write_adapter(tmp_path / "a", modules))
        with pytest.raises((CheckpointError, FileNotFoundError)) as caught:
            read_adapter(folder, config)
        assert "expected" in str(caught.value), kind
        assert len(str(caught.value)) < 3000, kind


def test_a_sparse_file_of_terabytes(tmp_path):
    """Sizes are those of the network before anything is read; a rank is bounded."""
    config, modules = config_of("llama"), modules_of("llama", ("q_proj",))
    folder = write_adapter(tmp_path / "a", modules, rank_pattern={"layers.0.self_attn.q_proj": 1 << 16})
    header, at, data = {}, 0, adapter_arrays(modules)
    for name, each in data.items():
        shape = [1 << 16 if size == 4 and "layers.0." in name else size for size in each.shape]
        header[name] = hostile_checkpoints.entry("F32", shape, at, at := at + 4 * math.prod(shape))
    image = "base_model.model.vision_tower.x.lora_A.weight"
    header[image] = hostile_checkpoints.entry("F32", [1 << 20, 1 << 20], at, at + (1 << 42))
    raw = json.dumps(header).encode()
    hostile_checkpoints.sparse(TENSORS, 8 + len(raw) + at + (1 << 42), len(raw).to_bytes(8, "little") + raw)(folder)
    with pytest.raises(CheckpointError, match="expected tensors that fit the memory of this machine"):
        read_adapter(folder, config)


def test_mutants(tmp_path):
    """One changed byte of a file: it is refused as damaged, or another adapter that is whole loads."""
    config, modules = config_of("llama"), modules_of("llama", ("q_proj", "down_proj"))
    random, folder, refused = np.random.default_rng(0), write_adapter(tmp_path / "a", modules), 0
    files = {name: (folder / name).read_bytes() for name in (CONFIG, TENSORS)}
    length = 8 + int.from_bytes(files[TENSORS][:8], "little")
    for number in range(600):
        name = (CONFIG, TENSORS)[number % 2]
        content = bytearray(files[name])
        content[random.integers(length if name == TENSORS else len(content))] ^= 1 << random.integers(8)
        (folder / name).write_bytes(content)
        try:
            assert read_adapter(folder, config).matrices
        except CheckpointError as error:
            refused += 1
            assert str(error).startswith(str(folder))
            assert "expected" in str(error)
        (folder / name).write_bytes(files[name])
    for size in (*range(0, length, 97), length - 1, length, length + 7, len(files[TENSORS]) - 1):
        (folder / TENSORS).write_bytes(files[TENSORS][:size])
        with pytest.raises(CheckpointError, match="expected"):
            read_adapter(folder, config)
    assert refused > 200
