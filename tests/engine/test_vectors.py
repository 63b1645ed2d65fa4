"""Vectors and scores of texts: those of sentence-transformers, the same bits in a batch, and what is refused."""

import re
import shutil

import numpy as np
import pytest
from gguf_files import ARRAY, I32, STRING, U32, convert
from places import GOLDEN
from seeded_weights import golden_folder
from tensor_files import pack_arrays
from vector_folders import TEXTS, VECTORS, changed, vector_folder

from kvcache import BatchEngine, EvictionPolicy, InferenceEngine, PrefixCachedEngine
from kvcache.engine.text_rows import LastLogits
from kvcache.errors import CheckpointError, InvalidOperationError
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
    return {layout: vector_folder(place, layout) for layout in ("last", "mean", "rerank")}


def golden(layout):
    return np.load(VECTORS / layout / "golden.npz")


@pytest.mark.parametrize("layout", ["last", "mean"])
@pytest.mark.parametrize("kind", ENGINES)
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


@pytest.mark.parametrize("layout", ["last", "mean"])
def test_a_vector_has_the_same_bits_alone_and_beside_others(folders, layout):
    rng = np.random.default_rng(5)
    texts = [rng.integers(0, 256, n) for n in (1, 15, 16, 17, 40, 130, 511)]
    texts += [np.concatenate([texts[4], rng.integers(0, 256, 9)]), texts[4]]
    engine = ENGINES["alone"](folders[layout], dtype="q8")
    alone = np.concatenate([engine.embed([text]) for text in texts])
    for kind in ENGINES:
        made = ENGINES[kind](folders[layout], dtype="q8")
        for order in (slice(None), slice(None, None, -1)):
            assert made.embed(texts[order]).tobytes() == np.ascontiguousarray(alone[order]).tobytes(), kind
        made.check()
    batch = ENGINES["batch"](folders[layout], dtype="q8", num_blocks=40, max_running=3)  # some wait, others give way
    with batch:
        requests = [batch.submit([1, 2, 3], max_tokens=30, temperature=0) for _ in range(4)]
        assert batch.embed(texts).tobytes() == alone.tobytes()
        tokens = [request.result() for request in requests]
    assert tokens == [engine.generate([1, 2, 3], max_tokens=30, temperature=0)] * 4


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
    if kind == "batch":
        total = sum(len(each.tokens) for each in engine.vectors().judged(TEXTS[0], DOCUMENTS, None, False))
        fresh = ENGINES[kind](folders["rerank"])
        fresh.rerank(TEXTS[0], DOCUMENTS)
        assert fresh.stats().prefilled_tokens < total / 2
    engine.check()


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
    for call in (BatchEngine.embed, BatchEngine.score_batch):
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
    # None, that of a first token, that of a class, and no number.
    for kind in ((U32, 0), (U32, 2), (U32, 4), (STRING, "mean"), (ARRAY, [1], I32)):
        path = convert(GOLDEN / "qwen3_tied", tmp_path / "other.gguf", qwen3__pooling_type=kind)
        with pytest.raises(ValueError, match="pooling: expected last or mean"):
            InferenceEngine.from_pretrained(path).embed(tokens)


def test_a_network_that_was_saved_without_its_head_may_say_that_it_has_one(tmp_path, folders):
    """As Qwen3-Embedding: the class with a head, a head that is no embedding, and no tensor of it."""
    folder = tmp_path / "last"
    shutil.copytree(folders["last"], folder)
    changed(folder, "config.json", architectures=["Qwen3ForCausalLM"], tie_word_embeddings=False)
    assert np.abs(InferenceEngine.from_pretrained(folder).embed(TEXTS) - golden("last")["vectors"]).max() < 2e-5


def test_a_network_that_sees_both_ways_is_refused_by_that_name(tmp_path):
    """As EmbeddingGemma; without that entry the class without a head is read as the one with it."""
    folder = tmp_path / "gemma3"
    shutil.copytree(GOLDEN / "gemma3", folder)
    whole = InferenceEngine.from_pretrained(folder).embed([[1, 2, 3]], "mean")
    changed(folder, "config.json", architectures=["Gemma3TextModel"])
    assert InferenceEngine.from_pretrained(folder).embed([[1, 2, 3]], "mean").tobytes() == whole.tobytes()
    changed(folder, "config.json", use_bidirectional_attention=True)
    with pytest.raises(CheckpointError, match="use_bidirectional_attention: expected false"):
        InferenceEngine.from_pretrained(folder)
