"""Sampling defaults of a checkpoint: what its files say, what they may not, and when a request has its own."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from chat_folders import chat_folder
from gguf_files import BOOL, F32, I32, STRING, U32, convert
from places import GOLDEN, search_path

from kvcache import CheckpointError, InferenceEngine, PrefixCachedEngine, SamplingParams
from kvcache.demo import DIRECTORY
from kvcache.engine.hub import checkpoint_path
from kvcache.gguf import GgufFile
from kvcache.sampling.defaults import folder_defaults, gguf_defaults

pytestmark = pytest.mark.one_build


def defaults(folder, content):
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder_defaults(folder)


def test_what_a_checkpoint_says_and_what_it_does_not(tmp_path):
    said = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.05}
    said |= {"presence_penalty": 1.5, "frequency_penalty": 0.25}
    others = {"do_sample": True, "max_new_tokens": 2048, "eos_token_id": [1, 2], "pad_token_id": 0}
    found = defaults(tmp_path, said | others)
    assert found == SamplingParams(**said, max_tokens=2048)
    assert defaults(tmp_path, {}) == defaults(tmp_path, {"temperature": None, "do_sample": None}) == SamplingParams()
    assert defaults(tmp_path, {"do_sample": False, "temperature": 0.6, "top_p": 0.5}) == SamplingParams(0.0, top_p=0.5)
    assert folder_defaults(tmp_path / "nowhere") == SamplingParams()
    assert defaults(tmp_path, {"top_k": -1}).top_k == SamplingParams(top_k=-1).top_k == 0
    path = convert(GOLDEN / "llama", tmp_path / "off.gguf", general__sampling__top_k=(I32, -1))
    assert gguf_defaults(GgufFile(path)).top_k == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", "hot"), ("temperature", -1), ("temperature", True), ("top_k", 1.5), ("top_k", -2), ("top_p", 2),
        ("top_p", 1.5), ("min_p", [0.1]), ("repetition_penalty", 0), ("max_new_tokens", "many"),
        ("max_new_tokens", -3), ("do_sample", 1), ("do_sample", "no"),
    ],
)
def test_a_value_that_is_none_of_its_key(tmp_path, key, value):
    with pytest.raises(CheckpointError, match=f"generation_config.json: {key}: expected .*, got "):
        defaults(tmp_path, {key: value})


@pytest.mark.parametrize("content", ["", "[]", "{", '{"top_k": NaN}', '{"top_k": 1, "top_k": 2}'])
def test_a_damaged_file(tmp_path, content):
    with pytest.raises(CheckpointError, match=r"generation_config.json: expected "):
        defaults(tmp_path, content)


def test_other_ways_to_generate_are_ignored_and_named(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "kvcache"):
        assert defaults(tmp_path, {"num_beams": 1, "typical_p": 1.0, "no_repeat_ngram_size": 0}) == SamplingParams()
        assert not caplog.records
        assert defaults(tmp_path, {"num_beams": 4, "penalty_alpha": 0.6, "top_k": 3}) == SamplingParams(top_k=3)
    assert [record.getMessage().split(": ", 1)[1] for record in caplog.records] == [
        "num_beams, penalty_alpha: ignored, since the engine has no such sampling"
    ]


def test_a_nucleus_of_nothing(tmp_path):
    """Some checkpoints say so where others say `do_sample` false: the most likely token."""
    prompt = [5, 6, 7]
    folder = chat_folder(tmp_path / "x", generation={"do_sample": True, "top_p": 0, "top_k": 50})
    engine = InferenceEngine.from_pretrained(folder)
    assert engine.sampling_params == SamplingParams(top_p=0.0, top_k=50)
    greedy = engine.generate(prompt, SamplingParams(temperature=0.0, max_tokens=9))
    assert engine.generate(prompt, SamplingParams(top_p=0.0, temperature=5.0, max_tokens=9)) == greedy
    path = convert(GOLDEN / "llama", tmp_path / "x.gguf", general__sampling__top_p=(F32, 0.0))
    assert gguf_defaults(GgufFile(path)) == SamplingParams(top_p=0.0)


def test_a_gguf_file_says_it_by_llama_cpps_names(tmp_path, caplog):
    names = {"temp": (F32, 0.25), "top_k": (I32, 7), "top_p": (F32, 0.5), "min_p": (F32, 0.125)}
    names |= {"penalty_repeat": (F32, 1.25), "mirostat": (I32, 2), "sequence": (STRING, "kmpt")}
    names |= {"penalty_last_n": (I32, 64)}
    path = convert(GOLDEN / "llama", tmp_path / "x.gguf", **{f"general__sampling__{k}": v for k, v in names.items()})
    with caplog.at_level(logging.WARNING, "kvcache"):
        assert gguf_defaults(GgufFile(path)) == SamplingParams(0.25, 7, 0.5, 1.25, min_p=0.125)
    assert "mirostat, penalty_last_n: ignored" in caplog.text
    assert InferenceEngine.from_pretrained(path).sampling_params.top_k == 7
    assert InferenceEngine.from_gguf(path).sampling_params.top_k == 7
    assert InferenceEngine.from_gguf(path, SamplingParams(top_k=9)).sampling_params.top_k == 9
    for entry in ((STRING, "hot"), (BOOL, True), (F32, -1.0)):
        wrong = convert(GOLDEN / "llama", tmp_path / "y.gguf", general__sampling__temp=entry)
        with pytest.raises(CheckpointError, match=r"y.gguf: general.sampling.temp: expected .*, got "):
            InferenceEngine.from_pretrained(wrong)
    plain = convert(GOLDEN / "llama", tmp_path / "z.gguf", general__alignment=(U32, 32))
    assert InferenceEngine.from_gguf(plain).sampling_params == SamplingParams()


def test_they_apply_where_no_params_are_given(tmp_path):
    prompt = [5, 6, 7]
    folder = chat_folder(tmp_path / "x", generation={"do_sample": False, "max_new_tokens": 6})
    engine = InferenceEngine.from_pretrained(folder)
    assert engine.sampling_params == SamplingParams(0.0, max_tokens=6)
    greedy = engine.generate(prompt, SamplingParams(temperature=0.0, max_tokens=6))
    assert engine.generate(prompt) == engine.complete(prompt).tokens == list(engine.stream(prompt)) == greedy
    assert PrefixCachedEngine(InferenceEngine.from_pretrained(folder), 8).generate(prompt) == greedy
    assert len(engine.generate(prompt, SamplingParams(max_tokens=9, seed=1))) == 9  # none of the checkpoint's
    own = InferenceEngine.from_pretrained(folder, SamplingParams(max_tokens=3, seed=1))
    assert len(own.generate(prompt)) == 3
    assert InferenceEngine(engine.model).sampling_params == SamplingParams()


@pytest.mark.parametrize("ids", [9, [9, 4], [4]])
def test_end_tokens_of_both_files(tmp_path, ids):
    """`generation_config.json` first, `config.json` where it says nothing; an id or a list of them."""
    want = tuple(sorted(ids)) if isinstance(ids, list) else (ids,)
    folder = chat_folder(tmp_path / "x", generation={"eos_token_id": ids})
    assert InferenceEngine.from_pretrained(folder).config.eos_token_ids == want
    folder = chat_folder(tmp_path / "y", generation={"temperature": 1.0})
    config = json.loads((DIRECTORY / "config.json").read_text()) | {"eos_token_id": ids}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    assert InferenceEngine.from_pretrained(folder).config.eos_token_ids == want


def test_a_path_of_the_users_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert checkpoint_path("~/models/tiny") == tmp_path / "models" / "tiny"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "~").mkdir()
    assert checkpoint_path("~") == Path("~")


# -- models of the hub ------------------------------------------------------------------------------------------

FROM_HUB = """
import sys
from kvcache import InferenceEngine

def load(name):
    try:
        print(InferenceEngine.from_pretrained(name).chat_template)
    except Exception as error:
        print(error)

load("some-body/tiny.model")
load("some-body/other")
sys.modules["huggingface_hub"] = None
load("some-body/tiny.model")
"""


def test_the_id_of_a_model_in_the_local_cache(tmp_path):
    pytest.importorskip("huggingface_hub")
    commit = "0123456789abcdef0123456789abcdef01234567"
    place = tmp_path / "models--some-body--tiny.model"
    chat_folder(place / "snapshots" / commit, "a template")
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commit)
    environment = os.environ | {"PYTHONPATH": search_path(), "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", FROM_HUB]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    found, missing = done.stdout.split("\n", 1)
    assert found == "a template", done.stderr
    assert "some-body/other: expected a folder, a file, or a model in the local cache" in missing
    assert "hf download some-body/other" in missing
    assert "needs the package huggingface_hub: pip install" in missing


def test_a_folder_that_is_there_is_no_id(tmp_path, monkeypatch):
    chat_folder(tmp_path / "some" / "model", "of the folder")
    monkeypatch.chdir(tmp_path)
    assert InferenceEngine.from_pretrained("some/model").chat_template == "of the folder"
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        InferenceEngine.from_pretrained(tmp_path / "nowhere")
