"""The example of README.md, run on a tiny model; and the list of architectures in bench/pages/transformers.md."""

import json
import re
import warnings

import pytest
import torch
from hf_models import DENSE, PACKED, make_model
from places import PROJECT

pytestmark = [pytest.mark.one_build, pytest.mark.no_level]


class Inputs(dict):
    """The result of a tokenizer."""

    input_ids = property(lambda self: self["input_ids"])


def test_the_example_runs(tmp_path):
    from transformers import AutoModelForCausalLM

    text = (PROJECT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```py\n(import kvcache\.integrations.*?)```", text, re.DOTALL)
    make_model("llama").save_pretrained(tmp_path)
    ids = torch.randint(3, 61, (1, 40))
    inputs = Inputs(input_ids=ids, attention_mask=torch.ones_like(ids))
    names = {"AutoModelForCausalLM": AutoModelForCausalLM, "name": tmp_path, "inputs": inputs}
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # names that transformers is about to drop
        exec(compile(example, "README example", "exec"), names)
    assert names["store"].stats().cached_blocks >= 2
    assert names["store"].cache_for(ids).get_seq_length() == 39


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
