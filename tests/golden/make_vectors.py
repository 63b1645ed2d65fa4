"""Make the golden vectors: layouts of sentence-transformers over a golden network, and what that makes of texts.

Run by hand, once, with torch, transformers and sentence-transformers installed; the tests only read its output:

    python tests/golden/make_vectors.py

Each layout becomes a folder of `vectors` without the network's weights, which are those of `qwen3_tied`, or those of
`gemma3` and `mistral_window` where tokens see later ones and layers have windows:

    vectors    float32 (n, dimensions)   of the texts of `texts.json`, without a prompt
    prompted   float32 (n, dimensions)   behind the prompt "query"
    scores     float32 (n,)              of a reranker: the texts as documents for the first one
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from tokenizers.decoders import ByteLevel
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedTokenizerFast

from kvcache.engine.vectors import _BEFORE, _BEHIND, INSTRUCTION

GOLDEN = Path(__file__).parent
NETWORK, VECTORS = GOLDEN / "qwen3_tied", GOLDEN / "vectors"
TEXTS = ["A cache of keys.", "", "x", "The rain in Spain stays mainly in the plain. " * 2, "Köln yes no"]
END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PROMPTS = {"query": "Instruct: find\nQuery: ", "document": ""}


def tokenizer() -> PreTrainedTokenizerFast:
    """One of 256 ids: most bytes, two words, and special tokens; an end token follows each text."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet())[:249], "ye", "yes", "no"]
    made = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [("y", "e"), ("ye", "s"), ("n", "o")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.decoder = ByteLevel()
    made.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in (END, START, STOP)])
    end = (END, made.token_to_id(END))
    made.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[end])
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token=END, eos_token=STOP, padding_side="left")


def save(name: str, made: SentenceTransformer, arrays: dict[str, np.ndarray]) -> None:
    """Write a layout without weights of the network."""
    folder = VECTORS / name
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as place:
        made.save(place, create_model_card=False)
        (Path(place) / "model.safetensors").unlink()
        shutil.copytree(place, folder)
    np.savez_compressed(folder / "golden.npz", **arrays)


def layout(name: str, pooling: str, dense: list[Dense], network: Path = NETWORK, **changes: Any) -> None:
    """Make a layout and its vectors.

    Args:
        changes: entries of the network's configuration.
    """
    with tempfile.TemporaryDirectory() as place:
        config = AutoConfig.from_pretrained(network)
        config.update(changes)
        AutoModel.from_pretrained(network, config=config, dtype=torch.float32).save_pretrained(place)
        tokenizer().save_pretrained(place)
        first = Transformer(place)
    made = SentenceTransformer(
        modules=[first, Pooling(first.get_embedding_dimension(), pooling), *dense, Normalize()], prompts=PROMPTS,
    )
    found = {key: made.encode(TEXTS, prompt_name=prompt, batch_size=1) for key, prompt in
             (("vectors", None), ("prompted", "query"))}
    save(name, made, found)


def reranker() -> None:
    """Make the layout of a reranker; its scores by the logits of transformers."""
    folder, ids = VECTORS / "rerank", tokenizer()
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "1_LogitScore").mkdir(parents=True)
    ids.save_pretrained(folder)
    yes, no = ids.convert_tokens_to_ids(["yes", "no"])
    module = {"true_token_id": yes, "false_token_id": no, "module_input_name": "causal_logits"}
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(module))
    kinds = {"base.modules.transformer.Transformer": "", "cross_encoder.modules.logit_score.LogitScore": "1_LogitScore"}
    modules = [{"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.{kind}"}
               for i, (kind, path) in enumerate(kinds.items())]
    (folder / "modules.json").write_text(json.dumps(modules))
    network, scores = AutoModelForCausalLM.from_pretrained(NETWORK, dtype=torch.float32), []
    for text in TEXTS:
        middle = f"<Instruct>: {INSTRUCTION}\n<Query>: {TEXTS[0]}\n<Document>: {text}"
        tokens = [each for part in (_BEFORE, middle, _BEHIND) for each in ids(part, add_special_tokens=False).input_ids]
        with torch.no_grad():
            logits = network(torch.tensor([tokens])).logits[0, -1]
        scores.append(torch.sigmoid(logits[yes] - logits[no]).item())
    np.savez_compressed(folder / "golden.npz", scores=np.array(scores, np.float32))


def main() -> None:
    """Make all of them."""
    torch.manual_seed(7)
    VECTORS.mkdir(exist_ok=True)
    (VECTORS / "texts.json").write_text(json.dumps(TEXTS))
    layout("last", "lasttoken", [])
    layout("mean", "mean", [
        Dense(64, 48, bias=False, activation_function=torch.nn.Identity()), Dense(48, 32),
    ])
    layout("gemma", "mean", [
        Dense(64, 96, bias=False, activation_function=torch.nn.Identity()),
        Dense(96, 64, bias=False, activation_function=torch.nn.Identity()),
    ], GOLDEN / "gemma3", use_bidirectional_attention=True)
    layout("both", "mean", [], is_causal=False)
    layout("windows", "lasttoken", [], GOLDEN / "mistral_window", is_causal=False)
    reranker()


if __name__ == "__main__":
    main()
