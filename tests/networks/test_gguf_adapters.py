"""Adapters in GGUF files: the same matrices as those of the folder that llama.cpp converts, and false files."""

from __future__ import annotations

import os
import re

import gguf
import numpy as np
import pytest
from hostile import checkpoints as hostile_checkpoints
from peft_folders import adapter_arrays, modules_of, write_adapter
from seeded_weights import golden_folder

from kvcache import InferenceEngine
from kvcache.errors import CheckpointError
from kvcache.gguf.file import GgufFile
from kvcache.networks.adapter_files import expect_settings, read_adapter
from kvcache.networks.config import ModelConfig

pytestmark = pytest.mark.one_build
# Networks with their architecture, and whether rows of q and k are in the order of interleaved RoPE.
NETWORKS = {"llama": ("llama", True), "granite": ("granite", True), "phi3_longrope": ("phi3", False)}
NETWORKS |= {"gemma3": ("gemma3", False), "glm4": ("glm4", True)}


def config_of(name):
    return ModelConfig.from_pretrained(golden_folder(name))


def converted(name, arrays):
    """The tensors of an adapter as llama.cpp names and orders them."""
    config, (architecture, interleaved) = config_of(name), NETWORKS[name]
    kinds = {kind: number for number, kind in gguf.MODEL_ARCH_NAMES.items()}
    names, found = gguf.get_tensor_name_map(kinds[architecture], config.num_layers), {}
    found = {}
    for tensor, array in arrays.items():
        path, side = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.weight", tensor).groups()
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(path.rpartition(".")[2])
        if heads and interleaved and side == "B" and architecture != "glm4":
            halves = array.reshape(heads, 2, -1, array.shape[1])
            array = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))
        found[f"{names.get_name(path)}.weight.lora_{side.lower()}"] = array
    return found


def write_gguf(path, tensors, architecture="llama", alpha=6.0, kind="adapter", way="lora", types=(), **entries):
    """Write a file; `types` are pairs of a name's end and the type of such tensors, `entries` more of the metadata."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type(kind)
    writer.add_string("adapter.type", way)
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    for key, value in entries.items():
        add = writer.add_array if isinstance(value, list) else writer.add_string
        add(key.replace("__", "."), value)
    for name, array in tensors.items():
        each = next((kind for end, kind in types if name.endswith(end)), None)
        if each is None:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, each), raw_dtype=each)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", NETWORKS)
def test_files_have_the_matrices_of_folders(tmp_path, name):
    config, modules = config_of(name), modules_of(name)
    want = read_adapter(write_adapter(tmp_path / "folder", modules), config)
    path = write_gguf(tmp_path / "x.gguf", converted(name, adapter_arrays(modules)), NETWORKS[name][0])
    expect_settings(path)
    found = read_adapter(path, config)
    assert (found.name, found.digest, found.matrices.keys()) == ("x", want.digest, want.matrices.keys())
    for key, each in found.matrices.items():
        np.testing.assert_array_equal(each.b, want.matrices[key].b)


def test_types_factors_and_tokens(tmp_path):
    """An alpha of 0 is a factor of 1; ranks may differ; matrices in blocks of codes are read in float32."""
    config, modules = config_of("llama"), modules_of("llama")
    tensors = converted("llama", adapter_arrays(modules, lambda path: 32 if "q_proj" in path else 3))
    path = tmp_path / "x.gguf"
    found = read_adapter(write_gguf(path, tensors, alpha=0.0), config)
    assert {(key[1], each.scale, each.rank) for key, each in found.matrices.items() if key[1] in "qk"} == {
        ("q", 1.0, 32), ("k", 1.0, 3)
    }
    assert read_adapter(write_gguf(path, tensors, alpha=8.0), config).matrices[0, "q"].scale == 0.25
    types = (("attn_q.weight.lora_a", gguf.GGMLQuantizationType.Q8_0), ("lora_b", gguf.GGMLQuantizationType.BF16))
    mixed = read_adapter(write_gguf(path, tensors, types=types), config)
    assert {each.b.dtype for each in mixed.matrices.values()} == {np.dtype(np.float32)}
    np.testing.assert_allclose(mixed.matrices[1, "q"].a, found.matrices[1, "q"].a, atol=4e-3)
    np.testing.assert_allclose(mixed.matrices[1, "q"].b, found.matrices[1, "q"].b, rtol=2**-8)
    key = "adapter__alora__invocation_tokens"
    assert read_adapter(write_gguf(path, tensors, **{key: [5, 7]}), config).invocation_tokens == (5, 7)
    for tokens in ([config.vocab_size], [-1], ["x"], [0.5]):
        with pytest.raises(CheckpointError, match="invocation_tokens: expected"):
            read_adapter(write_gguf(path, tensors, **{key: tokens}), config)


def test_an_engine_takes_a_file(tmp_path):
    modules = modules_of("llama")
    folder = write_adapter(tmp_path / "folder", modules)
    file = write_gguf(tmp_path / "x.gguf", converted("llama", adapter_arrays(modules)))
    engine = InferenceEngine.from_pretrained(golden_folder("llama"), adapters={"a": folder, "b": str(file)})
    tokens = np.arange(40)
    np.testing.assert_array_equal(engine.score(tokens, adapter="a"), engine.score(tokens, adapter="b"))
    assert np.abs(engine.score(tokens, adapter="b") - engine.score(tokens)).max() > 0.1


def test_files_that_are_refused(tmp_path):
    config, path = config_of("llama"), tmp_path / "x.gguf"
    tensors = converted("llama", adapter_arrays(modules_of("llama", ("q_proj",))))
    a, b = (f"blk.0.attn_q.weight.lora_{side}" for side in "ab")
    nan = np.where(np.arange(64) == 3, np.float32(np.nan), tensors[a])
    for more, change, message in (
        ({"kind": "model"}, {}, "general.type: expected adapter, got 'model'"),
        ({"way": "other"}, {}, "adapter.type: expected lora, got 'other'"),
        ({"architecture": "unheard"}, {}, "general.architecture: expected one of"),
        ({"alpha": None}, {}, "adapter.lora.alpha: expected a finite number of at least 0, got"),
        ({"alpha": float("nan")}, {}, "adapter.lora.alpha: expected a finite number"),
        ({"adapter__of_tomorrow": "x"}, {}, "adapter.of_tomorrow: expected none, since it is not supported"),
        ({}, {a: None}, "blk.0.attn_q.weight: expected lora_a and lora_b, got lora_b alone"),
        ({}, {b: None}, "blk.0.attn_q.weight: expected lora_a and lora_b, got lora_a alone"),
        ({}, {a: tensors[a][:3]}, "attn_q.weight.lora_b: expected shape (64, 3), got (64, 4)"),
        ({}, {a: tensors[a][:, :-1]}, "attn_q.weight.lora_a: expected shape (4, 64), got (4, 63)"),
        ({}, {b: tensors[b][:-1]}, "attn_q.weight.lora_b: expected shape (64, 4), got (63, 4)"),
        ({}, {a: tensors[a].reshape(-1)}, "attn_q.weight.lora_a: expected shape"),
        ({}, {"blk.2.attn_q.weight.lora_a": tensors[a]}, "blk.2.attn_q.weight.lora_a: expected a matrix of the ne"),
        ({}, {"output.weight.lora_a": tensors[a]}, "output.weight.lora_a: expected a matrix of the network"),
        ({}, {"blk.0.attn_norm.weight": tensors[a][0]}, "blk.0.attn_norm.weight: expected a matrix of the network"),
        ({}, {a: nan}, "expected finite numbers"),
        ({}, dict.fromkeys(tensors), "matrices: expected those of a projection or more, got none"),
    ):
        content = {name: each for name, each in (tensors | change).items() if each is not None}
        write_gguf(path, content, **more)
        with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
            read_adapter(path, config)
        assert str(caught.value).count(str(path)) == 1
    wide = converted("llama", adapter_arrays(modules_of("llama", ("q_proj",))))
    content = bytearray(write_gguf(path, wide, types=(("lora_a", gguf.GGMLQuantizationType.Q8_0),)).read_bytes())
    file = GgufFile(path)
    content[file[a].start : file[a].start + 2] = np.float16(np.nan).tobytes()
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="expected"):
        read_adapter(path, config)
    with pytest.raises(FileNotFoundError, match="expected a GGUF file, got none"):
        read_adapter(tmp_path / "none.gguf", config)
    network = tmp_path / "network.gguf"
    with pytest.raises(CheckpointError, match=r"general\.type: expected adapter, got 'model'"):
        expect_settings(write_gguf(network, tensors, kind="model"))


def test_a_file_that_changes_while_it_is_read(tmp_path, monkeypatch):
    config, modules = config_of("llama"), modules_of("llama", ("q_proj",))
    path, other = (
        write_gguf(tmp_path / f"{seed}.gguf", converted("llama", adapter_arrays(modules, seed=seed))) for seed in (0, 1)
    )
    os.utime(path, (1, 1))
    read, content = GgufFile.read, other.read_bytes()

    def changing(self, *args):
        path.write_bytes(content)
        read(self, *args)

    monkeypatch.setattr(GgufFile, "read", changing)
    with pytest.raises(CheckpointError, match="expected a file that stays as it is while it is read"):
        read_adapter(path, config)


def test_mutants(tmp_path):
    """One changed byte: the file is refused as damaged, or another adapter that is whole loads."""
    config, path, refused = config_of("llama"), tmp_path / "x.gguf", 0
    tensors = converted("llama", adapter_arrays(modules_of("llama", ("q_proj", "o_proj"))))
    content = write_gguf(path, tensors, adapter__alora__invocation_tokens=[5, 7]).read_bytes()
    head, random = content.index(b"attn_") + 800, np.random.default_rng(0)
    for _ in range(400):
        mutant = bytearray(content)
        mutant[random.integers(head)] ^= 1 << random.integers(8)
        path.write_bytes(mutant)
        try:
            assert read_adapter(path, config).matrices
        except CheckpointError as error:
            refused += 1
            assert str(error).startswith(str(path))
            assert "expected" in str(error)
    assert refused > 150
    for size in range(0, len(content), 331):
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match="expected"):
            read_adapter(path, config)
    for kind, make in hostile_checkpoints.SPECIAL.items():
        hostile_checkpoints.special(path.name, make)(tmp_path)
        with pytest.raises((CheckpointError, FileNotFoundError)) as caught:
            read_adapter(path, config)
        assert "expected" in str(caught.value), kind
        if path.is_dir():
            path.rmdir()
