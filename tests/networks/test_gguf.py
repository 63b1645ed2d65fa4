"""Networks in GGUF files, compared with the same networks in checkpoint folders."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from dense_runs import run_dense
from engines import GREEDY, PROMPT
from gguf_files import (
    ARRAY,
    BOOL,
    CONVERTIBLE,
    F32,
    I32,
    STRING,
    U32,
    as_converted,
    convert,
    entries_of,
    tensors_of,
    write,
)
from network_weights import assert_same_weights, float32
from places import GOLDEN, in_every_build
from seeded_weights import golden_folder

from kvcache.engine import InferenceEngine, ModelConfig, PrefixCachedEngine, Transformer
from kvcache.errors import CheckpointError
from kvcache.networks.gguf import GgufCheckpoint, is_gguf


@pytest.mark.parametrize("name", in_every_build(CONVERTIBLE))
def test_the_same_network(tmp_path, name):
    """Every golden network: weights bit for bit, configuration, logits."""
    folder = as_converted(golden_folder(name), tmp_path / name)
    expected = Transformer.from_pretrained(folder)
    found = Transformer.from_pretrained(convert(folder, tmp_path / "x.gguf"))
    assert_same_weights(found, expected)
    rope = found.config.rope
    same = {name: getattr(expected.config, name) for name in ("rope", "architecture", "eos_token_ids")}
    assert replace(found.config, **same) == expected.config
    if expected.config.rope.kind not in ("llama3", "longrope"):
        assert replace(rope, theta=expected.config.rope.theta) == expected.config.rope
    size = expected.config.rotary_dim
    for regime in range(1 + (rope.kind == "longrope")):
        wanted = expected.config.rope.frequencies(size, regime)
        np.testing.assert_allclose(rope.frequencies(size, regime), wanted, rtol=1e-7)
    logits = [run_dense(model, PROMPT) for model in (found, expected)]
    np.testing.assert_allclose(*logits, rtol=0, atol=2e-5)


def test_queries_keys_and_values_as_one(tmp_path):
    """GLM-4-9B as files of its first conversions have it, the biases too."""
    folder = golden_folder("glm")
    config = ModelConfig.from_pretrained(folder)
    letters, entries = entries_of(config, json.loads((folder / "config.json").read_text()))
    tensors = tensors_of(folder, config)
    for layer in range(config.num_layers):
        for kind in ("weight", "bias"):
            parts = [tensors.pop(f"blk.{layer}.attn_{part}.{kind}") for part in "qkv"]
            tensors[f"blk.{layer}.attn_qkv.{kind}"] = np.concatenate(parts)
    found = Transformer.from_pretrained(write(tmp_path / "x.gguf", letters, entries, tensors))
    assert_same_weights(found, Transformer.from_pretrained(folder))


def test_small_bands(tmp_path, monkeypatch):
    """Bands that are no whole number of heads."""
    monkeypatch.setattr("kvcache.networks.weights._BAND_BYTES", 7 * 64 * 4)
    found = Transformer.from_pretrained(convert(GOLDEN / "llama", tmp_path / "x.gguf"))
    assert_same_weights(found, Transformer.from_pretrained(GOLDEN / "llama"))


def test_a_network_in_several_files(tmp_path):
    """As the gguf package splits it."""
    config = ModelConfig.from_pretrained(GOLDEN / "llama")
    letters, entries = entries_of(config, json.loads((GOLDEN / "llama" / "config.json").read_text()))
    path = tmp_path / "x.gguf"
    write(path, letters, entries, tensors_of(GOLDEN / "llama", config), split_max_tensors=8)
    parts = sorted(tmp_path.glob("x-*-of-*.gguf"))
    assert len(parts) == 3
    engine = InferenceEngine.from_pretrained(parts[0])
    assert engine.generate(PROMPT, GREEDY) == InferenceEngine.from_pretrained(GOLDEN / "llama").generate(PROMPT, GREEDY)
    with pytest.raises(CheckpointError, match=r"x-00002-of-00003\.gguf: split.no: expected 0, that of the first"):
        InferenceEngine.from_pretrained(parts[1])


def test_from_gguf_of_any_name(tmp_path):
    path = convert(GOLDEN / "llama", tmp_path / "network")
    engine = InferenceEngine.from_gguf(str(path), seed=3, block_size=8)
    assert engine.cache.block_size == 8
    expected = InferenceEngine.from_pretrained(GOLDEN / "llama").generate(PROMPT, GREEDY)
    assert PrefixCachedEngine(engine, 16).generate(PROMPT, GREEDY) == expected
    assert engine.tokenizer is engine.chat_template is None


def test_a_file_without_its_suffix(tmp_path):
    """It is known by what it begins with; one with the suffix is read as such, whatever it begins with."""
    path = convert(GOLDEN / "llama", tmp_path / "sha256-0123")
    expected = InferenceEngine.from_pretrained(GOLDEN / "llama").generate(PROMPT, GREEDY)
    assert InferenceEngine.from_pretrained(path).generate(PROMPT, GREEDY) == expected
    for name, content in (("short", b"GGU"), ("empty", b""), ("other", b"PK" * 40)):
        (tmp_path / name).write_bytes(content)
        assert not is_gguf(tmp_path / name)
    (tmp_path / "x.GGUF").write_bytes(b"")
    assert is_gguf(tmp_path / "x.GGUF")
    os.mkfifo(tmp_path / "pipe")
    assert not is_gguf(tmp_path / "pipe")


def test_axes_of_one_row(tmp_path):
    """Converters keep the axis of one group that the experts' bias of ERNIE has, or drop it; llama.cpp reads both."""
    folder = golden_folder("ernie4_5_moe")
    config = ModelConfig.from_pretrained(folder)
    letters, entries = entries_of(config, json.loads((folder / "config.json").read_text()))
    tensors = tensors_of(folder, config)
    biases = [name for name in tensors if name.endswith("exp_probs_b.bias")]
    assert {tensors[name].shape for name in biases} == {(1, 7)}
    flat = tensors | {name: tensors[name].reshape(-1) for name in biases}
    paths = [write(tmp_path / f"{i}.gguf", letters, entries, each) for i, each in enumerate((tensors, flat))]
    expected = Transformer.from_pretrained(folder)
    for path in paths:
        assert_same_weights(Transformer.from_pretrained(path), expected)
    wrong = tensors | {name: np.ones((7, 1), np.float32) for name in biases}
    with pytest.raises(CheckpointError, match=r"exp_probs_b.bias: expected shape \(7,\), got \(7, 1\)"):
        Transformer.from_pretrained(write(tmp_path / "wrong.gguf", letters, entries, wrong))


def test_an_adapter(tmp_path):
    path = convert(GOLDEN / "llama", tmp_path / "x.gguf", general__type=(STRING, "adapter"))
    with pytest.raises(CheckpointError, match=r"x\.gguf: general\.type: expected model, got 'adapter'"):
        Transformer.from_pretrained(path)
    path = convert(GOLDEN / "llama", tmp_path / "y.gguf", general__type=(STRING, "model"))
    assert Transformer.from_pretrained(path).config.num_layers == 2


def test_a_directory_named_gguf(tmp_path):
    (tmp_path / "x.gguf").mkdir()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        InferenceEngine.from_pretrained(tmp_path / "x.gguf")


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"expected a GGUF file, got none at .*x\.GGUF"):
        InferenceEngine.from_pretrained(tmp_path / "x.GGUF")


def test_end_tokens(tmp_path):
    """The file names end tokens; special tokens with usual texts are some too, normal tokens of such texts are not."""
    texts = ["<|im_end|>", "a", "<|endoftext|>", "<|end|>", "<|eot_id|>", "b", "[EOT]", "[e~[", "<｜end▁of▁sentence｜>"]
    path = convert(
        GOLDEN / "llama",
        tmp_path / "x.gguf",
        tokenizer__ggml__model=(STRING, "gpt2"),
        tokenizer__ggml__tokens=(ARRAY, texts, STRING),
        tokenizer__ggml__token_type=(ARRAY, [3, 1, 3, 1, 4, 1, 3, 3, 3], I32),
        tokenizer__ggml__eos_token_id=(U32, 5),
        tokenizer__ggml__eot_token_id=(U32, 1),
    )
    assert Transformer.from_pretrained(path).config.eos_token_ids == (0, 1, 2, 4, 5, 6, 7, 8)


def test_an_end_that_is_a_tag_of_html(tmp_path):
    """Gemma has `</s>` as a piece of text; where it is a control token, or the one that is named, it ends a text."""
    for kind, ends, named in ((4, (1,), 1), (1, (1,), 1), (3, (0, 1), 1), (4, (0,), 0)):
        path = convert(
            GOLDEN / "llama",
            tmp_path / "x.gguf",
            tokenizer__ggml__model=(STRING, "llama"),
            tokenizer__ggml__tokens=(ARRAY, ["</s>", "<end>"], STRING),
            tokenizer__ggml__token_type=(ARRAY, [kind, 3], I32),
            tokenizer__ggml__eos_token_id=(U32, named),
        )
        assert Transformer.from_pretrained(path).config.eos_token_ids == ends


def test_end_tokens_of_harmony(tmp_path):
    """<|end|> ends a message of gpt-oss and of Solar Open, not its answer."""
    harmony, solar = ["<|return|>", "<|call|>", "<|end|>", "a"], ["<|flush|>", "<|calls|>", "<|end|>", "a"]
    for texts, kinds, ends in (
        (harmony, [3, 3, 3, 1], (0, 1)), (harmony, [3, 1, 3, 1], (0, 2)), (solar, [3, 3, 3, 1], (0, 1))
    ):
        path = convert(
            GOLDEN / "llama",
            tmp_path / "x.gguf",
            tokenizer__ggml__model=(STRING, "gpt2"),
            tokenizer__ggml__tokens=(ARRAY, texts, STRING),
            tokenizer__ggml__token_type=(ARRAY, kinds, I32),
        )
        assert Transformer.from_pretrained(path).config.eos_token_ids == ends


REFUSED = {
    "another architecture": ({"general.architecture": "gemma5"}, r"general.architecture: expected one of llama, .*"),
    "one that is known": (
        {"general.architecture": "deepseek4"},
        r"general.architecture: expected a network without attention over compressed .*, got 'deepseek4'",
    ),
    "shared experts": ({"llama.expert_shared_count": (U32, 1)}, "llama.expert_shared_count: expected 0, got 1"),
    "experts that are not there": (
        {"llama.expert_count": (U32, 8), "llama.expert_used_count": (U32, 2)},
        "expected the tensors blk.0.ffn_gate_inp.weight, .* and more, got none",
    ),
    "more experts than there are": (
        {"llama.expert_count": (U32, 8), "llama.expert_used_count": (U32, 9)},
        "llama.expert_used_count: expected .* up to 8, got 9",
    ),
    "a soft cap": ({"llama.attn_logit_softcapping": (F32, 50.0)}, "softcapping: expected 0.0, got 50.0"),
    "a window": ({"llama.attention.sliding_window": (U32, 64)}, "llama.attention.sliding_window: expected none, or .*"),
    "one of several files": ({"split.count": (U32, 3)}, "split.count: expected a file named NAME-00001-of-00003.gguf"),
    "partial RoPE": ({"llama.rope.dimension_count": (U32, 8)}, "rope.dimension_count: expected 16 as in every head"),
    "values of another size": (
        {"llama.attention.value_length": (U32, 8)},
        "value_length: expected 16 as in every head",
    ),
    "longrope": ({"llama.rope.scaling.type": (STRING, "longrope")}, "scaling.type: expected none, linear or yarn"),
    "a factor of texts": ({"llama.rope.scaling.factor": (STRING, "2")}, r"rope_scaling.factor: expected a finite.*'2'"),
    "an entry of RoPE that nothing reads": (
        {"llama.rope.scaling.by_night": (F32, 2.0)},
        "llama.rope.scaling.by_night: expected no such entry, got 2.0",
    ),
    "RoPE of windows": ({"llama.rope.freq_base_swa": (F32, 5e5)}, "freq_base_swa: expected 10000.0, got 500000.0"),
    "no layers": ({"llama.block_count": (U32, 0)}, "llama.block_count: expected .* up to 65536, got 0"),
    "NaN": (
        {"llama.rope.freq_base": (F32, float("nan"))},
        "llama.rope.freq_base: expected a finite number .*, got nan",
    ),
    "infinity": ({"llama.attention.layer_norm_rms_epsilon": (F32, float("inf"))}, "epsilon: expected a finite number"),
    "sizes per layer": (
        {"llama.feed_forward_length": (ARRAY, [112, 96], I32)},
        "feed_forward_length: expected one v",
    ),
    "texts per layer": ({"llama.block_count": (ARRAY, ["2", "2"], STRING)}, "block_count: expected one value for all"),
    "no heads": ({"llama.attention.head_count": None}, "llama.attention.head_count: expected a number, got nothing"),
    "three pairs": ({"llama.attention.head_count_kv": (U32, 3)}, "attention.head_count_kv: expected a divisor of 4"),
    "a mask as a number": ({"llama.attention.causal": (U32, 2)}, "llama.attention.causal: expected true or false"),
    "eos": ({"tokenizer.ggml.eos_token_id": (I32, -1)}, r"eos_token_id: expected token ids, got \[-1\]"),
    "billions of layers": ({"llama.block_count": (U32, 2**31 - 1)}, "llama.block_count: expected .* up to 65536"),
    "many layers": ({"llama.block_count": (U32, 65536)}, "expected the tensors blk.2.* and more, got none"),
    "fewer layers": ({"llama.block_count": (U32, 1)}, "llama.block_count: expected 2, the layers of the files, got 1"),
    "a larger MLP": ({"llama.feed_forward_length": (U32, 113)}, r"weight: expected shape \(\d+, \d+\), got"),
}


@pytest.mark.one_build
@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path, case):
    change, message = REFUSED[case]
    config = ModelConfig.from_pretrained(GOLDEN / "llama")
    letters, entries = entries_of(config, json.loads((GOLDEN / "llama" / "config.json").read_text()))
    change = dict(change)
    letters = change.pop("general.architecture", letters)
    entries = {key: content for key, content in (entries | change).items() if content}
    path = write(tmp_path / "x.gguf", letters, entries, tensors_of(GOLDEN / "llama", config))
    with pytest.raises(CheckpointError, match=rf"x\.gguf: .*{message}"):
        Transformer.from_pretrained(path)


def test_entries_without_an_effect(tmp_path):
    said = {"general__description": (STRING, b"na\xefve"), "llama__rope__freq_base_swa": (F32, 10000.0)}
    said |= {"llama__feed_forward_length": (ARRAY, [112, 112], I32)}
    said |= {"llama__attention__layer_norm_rms_epsilon": (ARRAY, [1e-6] * 2, F32)}
    said |= {"llama__attention__causal": (ARRAY, [True, True], BOOL)}
    said |= {"llama__rope__scaling__finetuned": (BOOL, True)}
    said |= {"llama__rope__dimension_sections": (ARRAY, [4, 2, 2, 0], I32)}
    expected = Transformer.from_pretrained(GOLDEN / "llama")
    found = Transformer.from_pretrained(convert(GOLDEN / "llama", tmp_path / "x.gguf", **said))
    assert_same_weights(found, expected)
    assert replace(found.config, architecture=expected.config.architecture) == expected.config


TENSORS = {
    "missing": (lambda t: t.pop("output_norm.weight"), "expected the tensors output_norm.weight, got none"),
    "unexpected": (lambda t: t.update({"blk.0.attn_sinks": np.ones(4, "f4")}), "others, got the tensors blk.0.attn_"),
    "a bias of one": (lambda t: t.update({"blk.0.attn_q.bias": np.ones(64, "f4")}), "the tensors blk.0.attn_k"),
    "another type": (
        lambda t: t.update({"token_embd.weight": (np.zeros((256, 64), np.int8), "I8")}),
        "token_embd.weight: expected F32, F16, BF16, Q8_0, .* or NVFP4, got I8",
    ),
    "a vector of blocks": (
        lambda t: t.update({"output_norm.weight": (np.zeros(68, np.uint8), "Q8_0")}),
        "output_norm.weight: expected F32, F16 or BF16 for a vector, got Q8_0",
    ),
    "a vector of blocks in a row": (
        lambda t: t.update({"output_norm.weight": (np.zeros((1, 68), np.uint8), "Q8_0")}),
        "output_norm.weight: expected F32, F16 or BF16 for a vector, got Q8_0",
    ),
    "divisors of another head": (
        lambda t: t.update({"rope_freqs.weight": np.ones(9, np.float32)}),
        r"rope_freqs.weight: expected F32 \(8,\), got F32 \(9,\)",
    ),
    "a divisor of 0": (
        lambda t: t.update({"rope_freqs.weight": np.array([1] * 7 + [0], np.float32)}),
        "rope_freqs.weight: expected positive numbers up to 1e.09, got 0.0",
    ),
    "a divisor that is none": (
        lambda t: t.update({"rope_freqs.weight": np.array([1] * 7 + [np.nan], np.float32)}),
        "rope_freqs.weight: expected positive numbers .*, got nan",
    ),
}


@pytest.mark.one_build
@pytest.mark.parametrize("case", TENSORS)
def test_refused_tensors(tmp_path, case):
    change, message = TENSORS[case]
    config = ModelConfig.from_pretrained(GOLDEN / "llama")
    letters, entries = entries_of(config, json.loads((GOLDEN / "llama" / "config.json").read_text()))
    tensors = tensors_of(GOLDEN / "llama", config)
    change(tensors)
    path = write(tmp_path / "x.gguf", letters, entries, tensors)
    with pytest.raises(CheckpointError, match=rf"x\.gguf: .*{message}"):
        Transformer.from_pretrained(path)


def test_qwen2_needs_its_biases(tmp_path):
    config = ModelConfig.from_pretrained(GOLDEN / "qwen2")
    letters, entries = entries_of(config, json.loads((GOLDEN / "qwen2" / "config.json").read_text()))
    tensors = {name: array for name, array in tensors_of(GOLDEN / "qwen2", config).items() if "bias" not in name}
    with pytest.raises(CheckpointError, match=r"expected the tensors blk.0.attn_q.bias, .* and more, got none"):
        Transformer.from_pretrained(write(tmp_path / "x.gguf", letters, entries, tensors))


@pytest.mark.parametrize("numbers", [[0.5, 0.5], ["a"] * 3, 3])
def test_numbers_of_xielu(tmp_path, numbers):
    """One for each layer, or one for all."""
    kind = STRING if numbers == ["a"] * 3 else F32
    wrong = (U32, 3) if numbers == 3 else (ARRAY, numbers, kind)
    folder = golden_folder("apertus")
    config = ModelConfig.from_pretrained(folder)
    letters, entries = entries_of(config, json.loads((folder / "config.json").read_text()))
    tensors = tensors_of(folder, config)
    numbers_of = {f"xielu.{name}": (F32, value) for name, value in (
        ("alpha_p", 0.5), ("alpha_n", 0.25), ("beta", 0.5), ("eps", -0.125)
    )}
    model = Transformer.from_pretrained(write(tmp_path / "x.gguf", letters, entries | numbers_of, tensors))
    for layer in model.weights.layers:
        np.testing.assert_allclose(layer.mlps[0].curve, [0.974077, 1.325939, 0.5, -0.125], rtol=1e-6)
    path = write(tmp_path / "y.gguf", letters, entries | numbers_of | {"xielu.alpha_n": wrong}, tensors)
    with pytest.raises(CheckpointError, match=r"xielu.alpha_n: expected a number for each of 3 layers, got"):
        Transformer.from_pretrained(path)
    path = write(tmp_path / "z.gguf", letters, entries | numbers_of | {"xielu.eps": (F32, 0.0)}, tensors)
    with pytest.raises(CheckpointError, match=r"act_fn: expected finite numbers and eps below 0, got"):
        Transformer.from_pretrained(path)


def test_no_file_stays_open(tmp_path):
    def opened():
        links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        return [target for link in links if os.path.lexists(link) and ".gguf" in (target := os.readlink(link))]

    path = convert(GOLDEN / "llama", tmp_path / "x.gguf")
    checkpoint = GgufCheckpoint(path)
    assert opened() == [str(path)]
    del checkpoint
    engine = InferenceEngine.from_gguf(path)
    assert engine.tokenizer is None
    assert opened() == []
    os.truncate(path, 100)
    assert engine.generate(PROMPT, GREEDY)


def test_two_kinds_of_scaling(tmp_path):
    more = {"llama.rope.scaling.type": (STRING, "linear"), "llama.rope.scaling.factor": (F32, 2.0)}
    path = convert(
        GOLDEN / "llama_llama3_bf16", tmp_path / "x.gguf", **{k.replace(".", "__"): v for k, v in more.items()}
    )
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight: expected no other scaling beside it, got linear"):
        Transformer.from_pretrained(path)


def test_float16_rows_of_llama(tmp_path):
    """Rows of two bytes per value are put back too."""
    config = ModelConfig.from_pretrained(GOLDEN / "llama_biases")
    letters, entries = entries_of(config, json.loads((GOLDEN / "llama_biases" / "config.json").read_text()))
    tensors = {
        name: (array.astype(ml_dtypes.bfloat16).view(np.uint8), "BF16") if array.ndim == 2 else array.astype(np.float16)
        for name, array in tensors_of(GOLDEN / "llama_biases", config).items()
    }
    found = Transformer.from_pretrained(write(tmp_path / "x.gguf", letters, entries, tensors))
    expected = Transformer.from_pretrained(GOLDEN / "llama_biases")
    for a, b in zip(found.weights.layers, expected.weights.layers, strict=True):
        want = float32(b.qkv).astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(float32(a.qkv), want)
        np.testing.assert_array_equal(a.qkv_bias, b.qkv_bias.astype(np.float16).astype(np.float32))
