"""Vectors and scores of texts: those of sentence-transformers, the same bits in a batch, and what is refused."""

import json
import re
import shutil
from typing import NamedTuple

import numpy as np
import pytest
from gguf_files import ARRAY, BOOL, I32, STRING, U32, convert, entries_of, tensors_of, write
from places import GOLDEN
from seeded_weights import golden_folder
from tensor_files import pack_arrays
from vector_folders import BOTH_WAYS, TEXTS, VECTORS, changed, vector_folder

from kvcache import BatchEngine, EvictionPolicy, InferenceEngine, PrefixCachedEngine
from kvcache.engine.text_rows import LastLogits
from kvcache.engine.vectors import Vectors
from kvcache.errors import CheckpointError, InvalidOperationError, OutOfMemoryError
from kvcache.networks.config import ModelConfig
from kvcache.networks.safetensors import SafetensorsFile
from kvcache.sampling.text_tokens import TooManyTokens

ENGINES = {
    "alone": lambda path, **options: InferenceEngine.from_pretrained(path, **options),
    "pieces": lambda path, **options: InferenceEngine.from_pretrained(path, prefill_chunk=16, **options),
    "cached": lambda path, **options: PrefixCachedEngine(InferenceEngine.from_pretrained(path, **options), 64),
    "batch": lambda path, **options: BatchEngine.from_pretrained(path, **options),
}
DOCUMENTS = [*TEXTS, "A cache of keys and values.", TEXTS[0]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("vectors")
    return {layout: vector_folder(place, layout) for layout in ("last", "mean", "rerank", *BOTH_WAYS)}


def gguf_folder(folder, path, tensors, entries):
    """Convert a folder of a layout to a GGUF file with more tensors, and more entries of its architecture."""
    config = ModelConfig.from_pretrained(folder)
    said = json.loads((folder / "config.json").read_text())
    letters, found = entries_of(config, said)
    own = "gemma-embedding" if said.get("use_bidirectional_attention") else letters
    found = {f"{own}.{key.removeprefix(letters + '.')}": value for key, value in found.items()}
    if own != letters:  # the tokens of both sides
        found[f"{own}.attention.sliding_window"] = (U32, said["sliding_window"])
    elif not config.causal:
        found[f"{own}.attention.causal"] = (BOOL, False)
    found |= {f"{own}.{key}": value for key, value in entries.items()}
    bare = path.parent / f"{path.stem}-folder"
    shutil.copytree(folder, bare, dirs_exist_ok=True)
    weights = SafetensorsFile(bare / "model.safetensors")
    prefixed = {name: name if name.startswith(("model.", "lm_head")) else f"model.{name}" for name in weights}
    named = {known: weights.read(name) for name, known in prefixed.items()}
    (bare / "model.safetensors").write_bytes(pack_arrays(named))
    return write(path, own, found, tensors_of(bare, config) | tensors)


def golden(layout):
    return np.load(VECTORS / layout / "golden.npz")


def kinds_of(layout):
    """The engines that take a network: one with a prefix cache takes none whose tokens see later ones."""
    return [kind for kind in ENGINES if kind != "cached" or layout not in BOTH_WAYS]


@pytest.mark.parametrize(("layout", "kind"), [
    (layout, kind) for layout in ("last", "mean", *BOTH_WAYS) for kind in kinds_of(layout)
])
def test_vectors_are_those_of_sentence_transformers(folders, layout, kind):
    engine, expected = ENGINES[kind](folders[layout]), golden(layout)
    found = engine.embed(TEXTS)
    assert found.dtype == np.float32
    assert found.shape == expected["vectors"].shape
    assert np.abs(found - expected["vectors"]).max() < 2e-5
    assert np.abs(engine.embed(TEXTS, prompt_name="query") - expected["prompted"]).max() < 2e-5
    assert found.tobytes() == engine.embed(TEXTS, prompt_name="document").tobytes()
    assert not np.allclose(expected["vectors"], expected["prompted"], atol=1e-3)
    engine.check()


@pytest.mark.parametrize("layout", ["last", "mean", "gemma", "windows"])
def test_a_vector_has_the_same_bits_alone_and_beside_others(folders, layout):
    rng = np.random.default_rng(5)
    texts = [rng.integers(0, 256, n) for n in (1, 15, 16, 17, 40, 130, 511)]
    texts += [np.concatenate([texts[4], rng.integers(0, 256, 9)]), texts[4]]
    engine = ENGINES["alone"](folders[layout], dtype="q8")
    alone = np.concatenate([engine.embed([text]) for text in texts])
    for kind in kinds_of(layout):
        made = ENGINES[kind](folders[layout], dtype="q8")
        for order in (slice(None), slice(None, None, -1)):
            assert made.embed(texts[order]).tobytes() == np.ascontiguousarray(alone[order]).tobytes(), kind
        made.check()
    batch = ENGINES["batch"](folders[layout], dtype="q8", num_blocks=40, max_running=3)  # some wait, others give way
    beside = range(0 if layout in BOTH_WAYS else 4)
    with batch:
        requests = [batch.submit([1, 2, 3], max_tokens=30, temperature=0) for _ in beside]
        assert batch.embed(texts).tobytes() == alone.tobytes()
        tokens = [request.result() for request in requests]
    assert tokens == [engine.generate([1, 2, 3], max_tokens=30, temperature=0) for _ in beside]
    batch.check()


def test_kinds_of_layers_and_residuals_change_no_vector_by_what_ran_before():
    rng = np.random.default_rng(6)
    first = rng.integers(0, 90, 70)
    texts = [np.concatenate([first[:n], rng.integers(0, 90, 5)]) for n in (70, 64, 63, 40, 33, 5, 0)]
    for network, options in (
        ("qwen3_tied", {"residual_length": 32, "dtype": "q4"}), ("gemma3", {}), ("mistral_window", {}),
        ("phi3_longrope", {}), ("lfm2", {}), ("qwen3_5", {}), ("gemma4", {}), ("gemma3n", {}),
        ("deepseek_v2", {}),
    ):
        engine = InferenceEngine.from_pretrained(golden_folder(network), **options)
        batch = BatchEngine.from_pretrained(golden_folder(network), **options)
        for pooling in ("last", "mean"):
            together = engine.embed(texts, pooling).tobytes()
            assert together == b"".join(engine.embed([text], pooling).tobytes() for text in texts), network
            assert together == batch.embed(texts, pooling).tobytes(), network
        prompts = [LastLogits(np.array(text, np.uint32), (3, 4)) for text in texts]
        for each in prompts:
            each.parts_at = (len(each.tokens) // 2,) if len(each.tokens) > 9 else ()
        batch._read(prompts, None)
        for each, text in zip(prompts, texts, strict=True):
            alone = LastLogits(np.array(text, np.uint32), (3, 4))
            engine._read([alone], None)
            assert alone.result.tobytes() == each.result.tobytes(), network
        batch.check()


@pytest.mark.parametrize("kind", ENGINES)
def test_scores_are_those_of_the_logits_and_the_prefix_runs_once(folders, kind):
    engine = ENGINES[kind](folders["rerank"])
    scores = engine.rerank(TEXTS[0], TEXTS)
    assert np.abs(np.array(scores) - golden("rerank")["scores"]).max() < 1e-4
    assert all(0 <= each <= 1 for each in scores)
    assert len({*scores}) == len(TEXTS)
    alone = [ENGINES[kind](folders["rerank"]).rerank(TEXTS[0], [each])[0] for each in DOCUMENTS]
    assert engine.rerank(TEXTS[0], DOCUMENTS) == alone
    assert engine.rerank(TEXTS[0], []) == []
    assert engine.rerank(TEXTS[0], TEXTS, "Is it short?") != scores
    if kind in ("batch", "cached"):
        total = sum(len(each.tokens) for each in engine.vectors().judged(TEXTS[0], DOCUMENTS, None, False))
        fresh = ENGINES[kind](folders["rerank"])
        assert fresh.rerank(TEXTS[0], DOCUMENTS) == alone
        ran = total - fresh.cache_stats().hit_tokens
        assert ran < total / 2
        assert fresh.rerank(TEXTS[0], DOCUMENTS) == alone  # most of it is cached now
        assert 2 * total - fresh.cache_stats().hit_tokens - ran < ran / 2
        fresh.check()
    engine.check()


def test_what_sees_later_tokens_is_embedded_and_nothing_else(tmp_path, folders):
    for make in (InferenceEngine, BatchEngine):
        engine = make.from_pretrained(folders["both"])
        calls = (
            ("submit", "generate_batch", "score_batch") if make is BatchEngine
            else ("generate", "complete", "stream", "score")
        )
        for call in calls:
            with pytest.raises(ValueError, match="generate: expected none with layers whose tokens see later ones"):
                getattr(engine, call)([[1, 2, 3]] if call.endswith("batch") else [1, 2, 3])
        for name, value in (("residual_length", 16), ("sparse_tokens", 16), ("calibrate", [1, 2, 3])):
            with pytest.raises(ValueError, match=f"{name}: expected .* with layers whose tokens see later ones"):
                make.from_pretrained(folders["both"], **{name: value})
    with pytest.raises(ValueError, match="generate: expected none"):
        InferenceEngine.from_pretrained(folders["both"]).prefill_from_pos([1, 2], 0)
    with pytest.raises(ValueError, match="engine: expected none with layers whose tokens see later ones"):
        ENGINES["cached"](folders["both"])
    with pytest.raises(ValueError, match="tiers: expected none with layers whose tokens see later ones"):
        BatchEngine.from_pretrained(folders["both"], autosave=tmp_path / "tier")
    engine = ENGINES["alone"](folders["both"], num_blocks=4)
    with pytest.raises(OutOfMemoryError):
        engine.embed([[1] * 100])
    assert engine.embed([[1, 2]]).shape == (1, 64)
    # Logits see both ways too, and share nothing.
    shutil.copytree(folders["rerank"], tmp_path / "rerank")
    changed(tmp_path / "rerank", "config.json", is_causal=False)
    engine, batch = ENGINES["alone"](tmp_path / "rerank"), ENGINES["batch"](tmp_path / "rerank")
    scores = engine.rerank(TEXTS[0], DOCUMENTS)
    assert scores == batch.rerank(TEXTS[0], DOCUMENTS) == [engine.rerank(TEXTS[0], [each])[0] for each in DOCUMENTS]
    assert not np.allclose(scores, ENGINES["alone"](folders["rerank"]).rerank(TEXTS[0], DOCUMENTS), atol=1e-3)
    assert batch.cache_stats().hit_tokens == 0


def test_dimensions_lengths_and_progress(folders):
    engine, seen = ENGINES["alone"](folders["last"]), []
    whole = engine.embed(TEXTS, normalise=False, progress=lambda *done: seen.append(done))
    assert seen == [(i + 1, len(TEXTS)) for i in range(len(TEXTS))]
    few = engine.embed(TEXTS, dimensions=16)
    assert few.shape == (len(TEXTS), 16)
    for row, unit in zip(whole[:, :16].astype(np.float64), few, strict=True):
        assert np.allclose(row / np.linalg.norm(row), unit, atol=1e-6)
    cut = engine.embed(TEXTS, normalise=False, dimensions=16)
    assert cut.tobytes() == np.ascontiguousarray(whole[:, :16]).tobytes()
    assert engine.embed([]).shape == (0, 64)
    assert not np.allclose(engine.embed(TEXTS, "mean"), engine.embed(TEXTS), atol=1e-3)
    for kind in ("cached", "batch"):
        seen.clear()
        ENGINES[kind](folders["last"]).embed(TEXTS[:2], progress=lambda *done: seen.append(done))
        assert (2, 2) in seen


def test_long_texts_are_refused_by_name_or_cut_before_their_end(folders):
    engine, text = ENGINES["alone"](folders["last"]), "\u1234" * 400
    assert len(engine.tokenizer.encode(text).ids) > 512
    with pytest.raises(TooManyTokens, match=r"texts\.1: expected at most 512 tokens"):
        engine.embed(["x", text])
    ids = engine.tokenizer.encode(text, add_special_tokens=False).ids
    end = engine.tokenizer.token_to_id("<|endoftext|>")
    assert engine.embed([text], truncate=True).tobytes() == engine.embed([[*ids[:511], end]]).tobytes()
    assert engine.embed([ids], truncate=True).tobytes() == engine.embed([ids[:512]]).tobytes()
    reranker = ENGINES["alone"](folders["rerank"])
    with pytest.raises(TooManyTokens, match=r"documents\.0: expected at most 512 tokens"):
        reranker.rerank("x", [text])
    assert 0 <= reranker.rerank("x", [text], truncate=True)[0] <= 1
    for query, truncate in ((text, False), (text, True), ("x" * 330, True)):  # nothing of documents would be left
        with pytest.raises(TooManyTokens, match=r"query: expected at most 512 tokens"):
            reranker.rerank(query, ["x", "y"], truncate=truncate)


def test_vectors_and_scores_of_an_engine_that_was_closed_meanwhile_are_no_shorter_list(folders):
    texts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    for call in (BatchEngine.embed, BatchEngine.score_batch, BatchEngine.generate_batch):
        engine = ENGINES["batch"](folders["mean"], max_running=1)
        with pytest.raises(InvalidOperationError):
            call(engine, texts, progress=lambda done, _, engine=engine: engine.close(cancel=True))
        engine.check()


@pytest.mark.parametrize(("error", "call"), [
    (r"texts\.1: expected at least one token, got none", lambda e: e.embed(["x", []])),
    (r"texts: expected a list of texts, got one text", lambda e: e.embed("x")),
    (r"pooling: expected last or mean", lambda e: e.embed(["x"], "cls")),
    (r"prompt_name: expected one of document, query, got 'other'", lambda e: e.embed(["x"], prompt_name="other")),
    (r"texts\.0: expected a text behind a prompt, got token ids", lambda e: e.embed([[1]], prompt_name="query")),
    (r"pooling: expected a str", lambda e: e.embed(["x"], ["mean"])),
    (r"prompt_name: expected a str", lambda e: e.embed(["x"], prompt_name=["query"])),
    (r"normalise: expected a bool", lambda e: e.embed(["x"], normalise=None)),
    (r"progress: expected a function", lambda e: e.embed(["x"], progress=True)),
    (r"texts: expected a list of texts, got NoneType", lambda e: e.embed(None)),
    (r"texts\.0: expected a text or token ids, got int", lambda e: e.embed([1, 2])),
    (r"documents: expected a list of texts, got int", lambda e: e.rerank("x", 1)),
    (r"truncate: expected a bool", lambda e: e.rerank("x", ["y"], truncate=1)),
    (r"dimensions: expected", lambda e: e.embed(["x"], dimensions=65)),
    (r"texts\.0: expected ids from 0 to 255", lambda e: e.embed([[256]])),
    (r"texts\.0: expected Unicode text", lambda e: e.embed(["\ud800"])),
    (r"documents: expected a list of texts", lambda e: e.rerank("x", "y")),
    (r"documents\.0: expected", lambda e: e.rerank("x", [1])),
    (r"query: expected", lambda e: e.rerank(None, ["x"])),
])
def test_what_is_refused(folders, error, call):
    engine = ENGINES["alone"](folders["last"])
    with pytest.raises((ValueError, TypeError), match=error):
        call(engine)
    assert engine.embed(["x"]).shape == (1, 64)


def test_rows_that_are_not_finite_are_an_error_and_no_warning(folders, monkeypatch, recwarn):
    for layout in ("last", "mean"):
        engine = ENGINES["alone"](folders[layout])
        forward = engine.model.forward
        for value in (np.float32(np.nan), np.float32(np.inf)):
            def damaged(*given, forward=forward, value=value, **more):
                return np.copysign(value, forward(*given, **more))

            monkeypatch.setattr(engine.model, "forward", damaged)
            with pytest.raises(ValueError, match="model: expected finite hidden rows"):
                engine.embed(TEXTS)
    assert not recwarn.list


def test_what_other_engines_refuse():
    evicting = {"eviction_policy": EvictionPolicy.H2O(), "kv_budget": 32}
    for make in (InferenceEngine, BatchEngine):
        with pytest.raises(ValueError, match=r"embed: expected none with an eviction_policy"):
            make.from_pretrained(GOLDEN / "llama", **evicting).embed([[1]], "last")
        engine = make.from_pretrained(GOLDEN / "llama")
        with pytest.raises(ValueError, match=r"pooling: expected last or mean"):
            engine.embed([[1]])
        with pytest.raises(ValueError, match=r"query: expected token ids, since the engine has no tokenizer"):
            engine.rerank("x", ["y"])


@pytest.mark.parametrize(("file", "entries", "error"), [
    ("1_Pooling/config.json", {"pooling_mode": "cls"}, "pooling_mode: expected lasttoken or mean"),
    ("1_Pooling/config.json", {"pooling_mode": ["mean", "lasttoken"]}, "pooling_mode: expected lasttoken or mean"),
    ("1_Pooling/config.json", {"include_prompt": 1}, "include_prompt: expected true or false"),
    ("2_Dense/config.json", {"activation_function": "torch.nn.ReLU"}, "activation_function: expected one of"),
    ("2_Dense/config.json", {"activation_function": ["torch.nn.Tanh"]}, "activation_function: expected one of"),
    ("2_Dense/config.json", {"out_features": 47}, "expected tensors"),
    ("2_Dense/config.json", {"use_residual": True}, "use_residual: expected False"),
    ("config_sentence_transformers.json", {"prompts": {"query": 1}}, "prompts: expected texts"),
    ("config_sentence_transformers.json", {"default_prompt_name": "x"}, "default_prompt_name: expected one of"),
    ("config_sentence_transformers.json", {"default_prompt_name": ["query"]}, "default_prompt_name: expected one of"),
    ("config_sentence_transformers.json", {"truncate_dim": 0}, "truncate_dim: expected"),
    ("config.json", {"architectures": ["BertModel"]}, "architectures: expected one of .* got .*BertModel"),
    ("config.json", {"architectures": ["Qwen3ForSequenceClassification"]}, "architectures: expected one of"),
    ("config.json", {"use_bidirectional_attention": True}, "use_bidirectional_attention: expected false"),
    ("config.json", {"is_causal": 0}, "is_causal: expected true or false"),
])
def test_layouts_that_are_not_read_are_refused_by_name(tmp_path, folders, file, entries, error):
    folder = tmp_path / "mean"
    shutil.copytree(folders["mean"], folder)
    changed(folder, file, **entries)
    with pytest.raises(CheckpointError, match=error):
        InferenceEngine.from_pretrained(folder)


def test_layers_and_tokens_that_do_not_go_with_the_network_are_refused_when_it_is_opened(tmp_path, folders):
    for layout in ("mean", "rerank"):
        shutil.copytree(folders[layout], tmp_path / layout)
    changed(tmp_path / "mean", "config_sentence_transformers.json", truncate_dim=999)  # cuts nothing
    engine = InferenceEngine.from_pretrained(tmp_path / "mean")
    assert engine.embed(["x"]).tobytes() == InferenceEngine.from_pretrained(folders["mean"]).embed(["x"]).tobytes()
    changed(tmp_path / "mean", "2_Dense/config.json", in_features=16)
    (tmp_path / "mean/2_Dense/model.safetensors").write_bytes(pack_arrays({"linear.weight": np.zeros((48, 16), "f4")}))
    with pytest.raises(CheckpointError, match="in_features: expected 64, got 16"):
        BatchEngine.from_pretrained(tmp_path / "mean")
    for token in (256, 251):
        changed(tmp_path / "rerank", "1_LogitScore/config.json", true_token_id=token, false_token_id=251)
        with pytest.raises(CheckpointError, match="true_token_id: expected two ids below 256"):
            InferenceEngine.from_pretrained(tmp_path / "rerank")


def test_older_files_of_a_layout_and_other_modules(tmp_path, folders):
    folder = tmp_path / "last"
    shutil.copytree(folders["last"], folder)
    older = {"pooling_mode": None, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
    changed(folder, "1_Pooling/config.json", **older)
    assert np.abs(InferenceEngine.from_pretrained(folder).embed(TEXTS) - golden("last")["vectors"]).max() < 2e-5
    modules = (folder / "modules.json").read_text()
    for old, new in (
        ("Normalize", "LayerNorm"), ("1_Pooling", "../1_Pooling"), ("1_Pooling", "1_Pooling\\u0000"), ("[", "{"),
    ):
        (folder / "modules.json").write_text(modules.replace(old, new))
        with pytest.raises(CheckpointError, match=re.escape("modules.json")):
            InferenceEngine.from_pretrained(folder)


def test_a_gguf_file_says_its_pooling(tmp_path):
    tokens, folder = [[5, 6, 7], [8] * 40], InferenceEngine.from_pretrained(GOLDEN / "qwen3_tied")
    for kind, pooling in ((3, "last"), (1, "mean")):
        path = convert(GOLDEN / "qwen3_tied", tmp_path / f"{pooling}.gguf", qwen3__pooling_type=(U32, kind))
        assert InferenceEngine.from_pretrained(path).embed(tokens).tobytes() == folder.embed(tokens, pooling).tobytes()
    path = convert(GOLDEN / "qwen3_tied", tmp_path / "other.gguf", qwen3__pooling_type=(U32, 0))
    with pytest.raises(ValueError, match="pooling: expected last or mean"):
        InferenceEngine.from_pretrained(path).embed(tokens)
    for kind in ((U32, 2), (U32, 5), (STRING, "mean"), (ARRAY, [1], I32)):
        path = convert(GOLDEN / "qwen3_tied", tmp_path / "other.gguf", qwen3__pooling_type=kind)
        with pytest.raises(CheckpointError, match=r"qwen3\.pooling_type: expected 0, 1, 3, or 4 of qwen3 and qwen3vl"):
            InferenceEngine.from_pretrained(path)


def test_a_gguf_file_of_embedding_gemma_has_its_dense_layers(tmp_path, folders):
    made = tmp_path / "gemma"
    shutil.copytree(folders["gemma"], made)
    changed(made, "config.json", query_pre_attn_scalar=24)  # the size of a head, as files do not say it
    path = gguf_folder(made, tmp_path / "gemma.gguf", {
        f"{name}.weight": SafetensorsFile(made / place / "model.safetensors").read("linear.weight")
        for name, place in (("dense_2", "2_Dense"), ("dense_3", "3_Dense"))
    }, {"pooling_type": (U32, 1)})
    folder = InferenceEngine.from_pretrained(made)
    tokens = [folder.tokenizer.encode(text).ids for text in TEXTS]
    found = InferenceEngine.from_pretrained(path).embed(tokens)
    assert found.tobytes() == folder.embed(tokens).tobytes()
    bare = gguf_folder(made, tmp_path / "bare.gguf", {}, {"pooling_type": (U32, 1)})
    assert InferenceEngine.from_pretrained(bare).embed(tokens).shape == (len(TEXTS), 64)
    bad = gguf_folder(made, tmp_path / "bad.gguf", {"dense_2.weight": np.zeros((8, 9), np.float32)},
                      {"pooling_type": (U32, 1)})
    with pytest.raises(CheckpointError, match="in_features: expected 64, got 9"):
        InferenceEngine.from_pretrained(bad)
    both = gguf_folder(folders["both"], tmp_path / "both.gguf", {}, {"pooling_type": (U32, 1)})
    tokens = tokens[:2]
    assert (
        InferenceEngine.from_pretrained(both).embed(tokens).tobytes()
        == InferenceEngine.from_pretrained(folders["both"]).embed(tokens).tobytes()
    )


def test_a_gguf_file_of_a_reranker_has_two_rows_of_its_head(tmp_path, folders):
    """Larger files of Qwen3-Reranker have no other rows of a head that is no embedding."""
    folder = InferenceEngine.from_pretrained(folders["rerank"])
    yes, no = (folder.tokenizer.token_to_id(each) for each in ("yes", "no"))
    head = SafetensorsFile(folders["rerank"] / "model.safetensors").read("model.embed_tokens.weight")[[yes, no]]
    ranks = {"pooling_type": (U32, 4), "classifier.output_labels": (ARRAY, ["yes", "no"], STRING)}
    path = gguf_folder(folders["rerank"], tmp_path / "rank.gguf", {"cls.output.weight": head}, ranks)
    scores = folder.rerank(TEXTS[0], DOCUMENTS)
    for kind, make in (("alone", InferenceEngine), ("batch", BatchEngine)):
        engine = make.from_pretrained(path)
        text = engine._checkpoint()
        assert text.vectors.is_reranker, kind
        readings = Vectors(engine.model, _Spoken(folder.tokenizer, text.vectors), None).judged(
            TEXTS[0], DOCUMENTS, None, False
        )
        engine._read(readings, None)
        assert np.allclose(engine.vectors().scores(readings), scores, atol=1e-4), kind
        if kind == "batch":
            assert engine.cache_stats().hit_tokens > 0
    for tensors, entries, error in (
        ({}, ranks, r"cls\.output\.weight: expected a matrix, got none"),
        ({"cls.output.weight": head[:1]}, ranks, r"cls\.output\.weight: expected shape \(2, 64\)"),
        ({"cls.output.weight": head}, ranks | {"classifier.output_labels": (ARRAY, ["no"], STRING)}, "yes and no"),
    ):
        with pytest.raises(CheckpointError, match=error):
            InferenceEngine.from_pretrained(gguf_folder(folders["rerank"], tmp_path / "bad.gguf", tensors, entries))
    other = convert(GOLDEN / "llama", tmp_path / "llama.gguf", llama__pooling_type=(U32, 4))
    with pytest.raises(CheckpointError, match=r"llama\.pooling_type: expected 0, 1, 3, or 4 of qwen3"):
        InferenceEngine.from_pretrained(other)


class _Spoken(NamedTuple):
    """The text side of a file without a vocabulary, with a tokenizer of its folder."""

    tokenizer: object
    vectors: object


def test_a_network_that_was_saved_without_its_head_may_say_that_it_has_one(tmp_path, folders):
    """As Qwen3-Embedding: the class with a head, a head that is no embedding, and no tensor of it."""
    folder = tmp_path / "last"
    shutil.copytree(folders["last"], folder)
    changed(folder, "config.json", architectures=["Qwen3ForCausalLM"], tie_word_embeddings=False)
    assert np.abs(InferenceEngine.from_pretrained(folder).embed(TEXTS) - golden("last")["vectors"]).max() < 2e-5


def test_the_windows_of_networks_that_see_both_ways(tmp_path):
    """EmbeddingGemma counts the tokens of both sides; `is_causal` leaves those of each. Odd ones are rounded down."""
    folder = tmp_path / "gemma3"
    shutil.copytree(GOLDEN / "gemma3", folder)
    for changes, window in (
        ({}, 24), ({"use_bidirectional_attention": True}, 13), ({"sliding_window": 25}, 13),
        ({"use_bidirectional_attention": False, "is_causal": False}, 26),
    ):
        changed(folder, "config.json", **changes)
        config = ModelConfig.from_pretrained(folder)
        assert (config.windows, config.causal) == ((window, window, None, window), not changes)
    for network in ("lfm2", "gemma4", "qwen3_5"):
        shutil.copytree(golden_folder(network), tmp_path / network)
        changed(tmp_path / network, "config.json", is_causal=False)
        with pytest.raises(CheckpointError, match="is_causal: expected true"):
            ModelConfig.from_pretrained(tmp_path / network)
