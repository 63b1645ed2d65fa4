"""The examples of README.md and of the guide on a tiny model; the architectures in bench/pages/transformers.md."""

import json
import re
import warnings

import pytest
import torch
from hf_models import DENSE, PACKED, make_model
from places import PROJECT

pytestmark = pytest.mark.one_build


class Inputs(dict):
    """The result of a tokenizer."""

    input_ids = property(lambda self: self["input_ids"])


def tokenizer(text, return_tensors):
    """40 tokens of the tiny model, whatever the text."""
    assert return_tensors == "pt"
    ids = torch.randint(3, 61, (1, 40))
    return Inputs(input_ids=ids, attention_mask=torch.ones_like(ids))


def blocks_of(page):
    """The examples of a page that need a model."""
    return re.findall(r"```py\n(.*?)```", (PROJECT / page).read_text(encoding="utf-8"), re.DOTALL)


def test_the_examples_run(tmp_path, monkeypatch):
    """README.md has one, the guide four, which go on from one another."""
    import transformers

    (example,) = (block for block in blocks_of("README.md") if "kvcache.integrations" in block)
    beginning, prefixes, packing, files = blocks_of("kvcache/guides/transformers.md")
    make_model("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name: tokenizer)
    monkeypatch.chdir(tmp_path)  # the guide saves files
    names = {"name": tmp_path, "AutoConfig": transformers.AutoConfig}
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # names that transformers is about to drop
        for text in (example, beginning, prefixes, packing, files):
            exec(compile(text, "example", "exec"), names)
    assert names["output"].shape[1] > 40
    assert names["store"].stats().cached_blocks >= 2
    assert names["store"].cache_for(names["inputs"].input_ids).get_seq_length() == 39
    assert (tmp_path / "model.packed").stat().st_size > 0


def test_the_list_names_every_architecture():
    page = (PROJECT / "bench" / "pages" / "transformers.md").read_text(encoding="utf-8")

    def letters(name):
        return re.sub(r"[^a-z0-9+]", "", name.lower())

    said = {letters(name) for name in re.split(r"[,;:()]\s?|\.\s", page.replace("\n", " "))}
    other = {"ernie4_5": "ernie4.5", "gemma3_text": "gemma3", "gemma3n_text": "gemma3n", "gemma4_text": "gemma4"}
    other |= {"hunyuan_v1_dense": "hunyuan", "llama4_text": "llama4"}
    assert not [kind for kind in (*PACKED, *DENSE) if letters(other.get(kind, kind)) not in said]


def test_the_bench_measures(tmp_path, capsys):
    from bench.__main__ import main

    assert main(["transformers", "--quick", "--only", "decode", "--json", str(tmp_path / "figures.json")]) == 0
    (table,) = json.loads((tmp_path / "figures.json").read_text())["tables"]
    times = table["cases"][0]["seconds"]
    assert {"DynamicCache, sdpa", "PagedCache f32", "PagedCache q4"} <= set(times)
    assert "K and V: DynamicCache, sdpa" in capsys.readouterr().out
