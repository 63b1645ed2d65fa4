"""Text to tokens and back, for checkpoints with and without a tokenizer."""

from __future__ import annotations

import gc
import json
import shutil
import sys

import pytest
from chat_folders import chat_folder
from engines import GREEDY, PROMPT
from gguf_files import ARRAY, STRING, U32, convert
from places import GOLDEN
from tokenizers.pre_tokenizers import ByteLevel

from kvcache.demo import DIRECTORY
from kvcache.engine import InferenceEngine
from kvcache.errors import CheckpointError
from kvcache.sampling.text_files import TextFiles
from kvcache.sampling.tokenizer import CheckpointText, GgufText


@pytest.fixture
def with_tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    shutil.copytree(GOLDEN / "llama", tmp_path, dirs_exist_ok=True)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_tokenizer(with_tokenizer):
    tokenizer = InferenceEngine.from_pretrained(with_tokenizer).tokenizer
    assert tokenizer.encode("b a c").ids == [1, 0, 2]


def test_no_truncation_and_no_padding(with_tokenizer):
    """A file may keep both from its training."""
    tokenizers = pytest.importorskip("tokenizers")
    path = str(with_tokenizer / "tokenizer.json")
    words = tokenizers.Tokenizer.from_file(path)
    words.enable_truncation(2)
    words.enable_padding(length=8)
    words.save(path)
    assert words.encode("b").ids == [1, 0, 0, 0, 0, 0, 0, 0]
    tokenizer = InferenceEngine.from_pretrained(with_tokenizer).tokenizer
    assert tokenizer.encode("b a b a").ids == [1, 0, 1, 0]


def test_no_tokenizer_file():
    assert InferenceEngine.from_pretrained(GOLDEN / "llama").tokenizer is None


def test_damaged_tokenizer(with_tokenizer):
    (with_tokenizer / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        _ = InferenceEngine.from_pretrained(with_tokenizer).tokenizer


def test_tokenizers_not_installed(with_tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    engine = InferenceEngine.from_pretrained(with_tokenizer)
    with pytest.raises(ImportError, match=r"kvcache-cpu\[text\]"):
        _ = engine.tokenizer
    assert engine.generate(PROMPT, GREEDY)


def test_no_chat_template(with_tokenizer):
    assert InferenceEngine.from_pretrained(with_tokenizer).chat_template is None
    (with_tokenizer / "tokenizer_config.json").write_text("{}")
    assert InferenceEngine.from_pretrained(with_tokenizer).chat_template is None


@pytest.mark.parametrize(
    "template",
    ["{{ x }}", [{"name": "tool_use", "template": "y"}, {"name": "default", "template": "{{ x }}"}]],
)
def test_chat_template(with_tokenizer, template):
    (with_tokenizer / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert InferenceEngine.from_pretrained(with_tokenizer).chat_template == "{{ x }}"


def test_chat_template_of_a_processor(with_tokenizer):
    """Older folders of networks that take images have it in a file of its own; the tokenizer's comes first."""
    path = with_tokenizer / "chat_template.json"
    path.write_text(json.dumps({"chat_template": "{{ y }}"}))
    assert InferenceEngine.from_pretrained(with_tokenizer).chat_template == "{{ y }}"
    path.write_text(json.dumps({"chat_template": 3}))
    with pytest.raises(CheckpointError, match=r"chat_template\.json: chat_template: expected a string, got 3"):
        _ = InferenceEngine.from_pretrained(with_tokenizer).chat_template
    (with_tokenizer / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ x }}"}))
    assert InferenceEngine.from_pretrained(with_tokenizer).chat_template == "{{ x }}"


def test_special_tokens(tmp_path):
    """`special_tokens_map.json` comes first, unless `tokenizer_config.json` lists its tokens itself."""

    def found(config, special):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
        return CheckpointText(tmp_path).special_tokens

    assert found({}, {"bos_token": "<s>", "eos_token": {"content": "</s>"}}) == {
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    assert found({"bos_token": "a", "eos_token": "b"}, {"bos_token": "<s>"}) == {"bos_token": "<s>", "eos_token": "b"}
    assert found({"bos_token": "a", "added_tokens_decoder": {}}, {"bos_token": "<s>"}) == {"bos_token": "a"}
    with pytest.raises(CheckpointError, match=r"special_tokens_map\.json: eos_token: expected a string, got 3"):
        found({}, {"eos_token": 3})


def test_what_was_opened_stays(tmp_path):
    """Whatever becomes of the files, and though none of it was used before: a folder, and a GGUF file."""
    pytest.importorskip("tokenizers")
    folder = chat_folder(tmp_path / "folder", "{{ bos_token }}{{ tools }}", bos_token="<|endoftext|>")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("of tools")
    path = convert(
        DIRECTORY, tmp_path / "x.gguf", tokenizer__ggml__model=(STRING, "gpt2"),
        tokenizer__ggml__tokens=(ARRAY, [*sorted(ByteLevel.alphabet()), "<s>", "im"], STRING),
        tokenizer__ggml__merges=(ARRAY, ["i m"], STRING), tokenizer__ggml__bos_token_id=(U32, 256),
        tokenizer__chat_template=(STRING, "{{ bos_token }}"), tokenizer__chat_template__tool_use=(STRING, "of tools"),
    )
    for opened, bos in ((folder, "<|endoftext|>"), (path, "<s>")):
        engine = InferenceEngine.from_pretrained(opened)
        moved = opened.rename(tmp_path / "moved")
        text = engine.requests.text
        assert text.template("tool_use") == "of tools"
        assert engine.chat_template.startswith("{{ bos_token }}")
        assert text.special_tokens["bos_token"] == bos
        assert engine.tokenizer.encode("a b").ids
        assert engine.apply_chat_template([{"role": "user", "content": "x"}]).startswith(bos)
        shutil.rmtree(moved) if moved.is_dir() else moved.unlink()


def test_a_template_in_place_of_those_of_a_checkpoint(tmp_path):
    path = convert(GOLDEN / "llama", tmp_path / "x.gguf", tokenizer__chat_template=(STRING, "{{ x }}"))
    for text in (CheckpointText(chat_folder(tmp_path / "folder"), ""), GgufText(path, "")):
        assert text.chat_template == text.template("tool_use") == ""


def test_a_text_is_made_once_and_what_it_is_made_of_is_freed(with_tokenizer):
    """A file that cannot be read is an error of what needs it, each time."""

    def contents():
        return [each for each in gc.get_objects() if type(each) is TextFiles and each.folder == with_tokenizer]

    text = CheckpointText(with_tokenizer)
    assert ["tokenizer.json" in each for each in contents()] == [True]
    assert text.tokenizer is text.tokenizer
    assert ["tokenizer.json" in each for each in contents()] == [False]
    assert (text.chat_template, text.special_tokens) == (None, {})
    assert contents() == []
    (with_tokenizer / "chat_template.jinja").mkdir()
    text = CheckpointText(with_tokenizer)
    assert text.tokenizer.encode("b").ids == [1]
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"chat_template\.jinja: expected a regular file"):
            text.template("default")


def test_damaged_chat_template(with_tokenizer):
    (with_tokenizer / "tokenizer_config.json").write_text('{"chat_template": 3}')
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template: expected a string, got 3"):
        _ = InferenceEngine.from_pretrained(with_tokenizer).chat_template


def test_own_networks_have_no_text(network):
    engine = InferenceEngine(network)
    assert engine.tokenizer is engine.chat_template is None
