"""`kvcache serve`: what it refuses before the model loads, the name of the model, the file of keys."""

import argparse
import json
import re
import sys
from functools import partial
from unittest.mock import Mock

import pytest
from event_reader import Reader
from peft_folders import modules_of, write_adapter
from places import PROJECT
from posix_modules import needs_posix

from kvcache.__main__ import main
from kvcache.commands.options import default_sizes, name_of
from kvcache.demo import DIRECTORY
from kvcache.engine import template_sandbox
from kvcache.support.machine_memory import MachineMemory

pytest.importorskip("uvicorn")
pytestmark = pytest.mark.one_build


ENGINE = Mock(memory=lambda: {"weights": 0, "kv": 0})


@pytest.fixture
def made(monkeypatch):
    """The name and the keys of each application that is made; none is served."""
    found = []

    def make_app(models, keys, **limits):
        found.append((*(slot.names[0] for slot in models), keys))
        raise ValueError

    monkeypatch.setattr("kvcache.commands.serve.open_engine", lambda *arguments, **options: ENGINE)
    monkeypatch.setattr("kvcache.server.app.make_app", make_app)  # first: it imports what comes after it
    monkeypatch.setattr("kvcache.server.served_model.ServedModel", lambda engine, *names, **more: Mock(engine=engine))
    return found


def test_the_name_of_the_model(made, tmp_path, monkeypatch):
    (tmp_path / "Small").mkdir()
    monkeypatch.chdir(tmp_path / "Small")
    for model in (".", "../Small", "x/Small.gguf", "owner/Small"):
        main(["serve", "--port", "0", "--model", model])
    assert made == [("Small", None)] * 4


def test_a_file_of_keys_with_a_byte_order_mark(made, tmp_path):
    (tmp_path / "keys").write_bytes(b"\xef\xbb\xbf# ours\nsesame a\n")
    main(["serve", "--port", "0", "--api-keys", str(tmp_path / "keys")])
    assert [keys for _, keys in made] == [{"sesame": "a"}]


def test_what_the_command_refuses(capsys, monkeypatch):
    assert main(["serve", "--host", "0.0.0.0"]) == 2
    assert "host: expected a loopback address, or --api-keys" in capsys.readouterr().err
    for arguments, message in (
        (["--host", "example.com"], "host: expected a loopback address, or --api-keys beside it, got example.com"),
        (["--port", "99999"], "port: expected an int <= 65535, got 99999"),
        (["--api-keys", "nowhere.txt"], "--api-keys: expected a path that can be opened, got nowhere.txt: No "),
        (["--timeout", "0"], "timeout: expected a finite number above 0, got 0.0"),
        (["--timeout", "inf"], "timeout: expected a finite number above 0, got inf"),
        (["--timeout", "nan"], "timeout: expected a finite number above 0, got nan"),
        (["--max-body", "0"], "--max-body: expected an int >= 1, got 0"),
        (["--max-queue", "0"], "--max-queue: expected an int >= 1, got 0"),
        (["--max-running", "0"], "--max-running: expected an int >= 1, got 0"),
        (["--max-vectors", "0"], "--max-vectors: expected an int >= 1, got 0"),
        (["--pooling", "cls"], "--pooling: expected last or mean, got 'cls'"),
        (["--draft-tokens", "17"], "--draft-tokens: expected an int <= 16, got 17"),
        (["--sparse-tokens", "0"], "--sparse-tokens: expected an int >= 1, got 0"),
        (["--spill", "folder"], "--max-memory: expected the bytes in memory beside --spill, got none"),
        (["--activations", "q8"], "--activations: expected one of int8, exact, bf16, got 'q8'"),
        (["--drain", "-1"], "drain: expected an int >= 0, got -1"),
        (["--kv-events", "5557"], "--kv-events: expected an address such as tcp://127.0.0.1:5557, got '5557'"),
        (["--kv-events", "tcp://127.0.0.1:*", "--kv-events-replay", "x"], "--kv-events-replay: expected an address"),
        (["--kv-events", "tcp://127.0.0.1:*", "--kv-events-rank", "-1"], "--kv-events-rank: expected an int >= 0"),
        (["--adapter", "x"], "--adapter: expected NAME=PATH, each name once, got 'x'"),
        (["--adapter", "=x"], "--adapter: expected NAME=PATH, each name once, got '=x'"),
        (["--adapter", "x=nowhere"], "--adapter: expected a local checkpoint directory with adapter_config.json"),
        (["--adapter-folder", "nowhere"], "--adapter-folder: expected a folder, got none at nowhere"),
        (["--kv-events-topic", "x"], "--kv-events-topic: expected --kv-events beside it, got 'x'"),
    ):
        assert main(["serve", "--model", "nowhere", *arguments]) == 2, "before the model is looked for"
        assert message in capsys.readouterr().err
    monkeypatch.setenv("KVCACHE_API_KEYS", "")
    assert main(["serve", "--host", "0.0.0.0"]) == 2
    assert "--api-keys: expected at least one key" in capsys.readouterr().err


@pytest.mark.parametrize(("package", "extra", "arguments"), [
    ("tokenizers", "serve", []), ("uvicorn", "serve", []), ("opentelemetry", "otel", ["--otel"]),
    ("redis", "redis", ["--redis", "redis://127.0.0.1:1/0", "--tier-secret", "secret"]),
    ("obstore", "objects", ["--object-store", "memory:///", "--tier-secret", "secret"]),
    ("zmq", "cluster", ["--kv-events", "tcp://127.0.0.1:*"]),
    ("msgspec", "cluster", ["--kv-events", "tcp://127.0.0.1:*"]),
])
def test_an_absent_package_is_told_with_its_extra(package, extra, arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret").write_text("s" * 32)
    for module in ("kvcache.server.process", *(name for name in sys.modules if name.startswith(f"{package}."))):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.delattr("kvcache.server.process", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["serve", "--port", "0", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"pip install 'kvcache-cpu[{extra}]'" in error


@needs_posix
def test_a_folder_of_autosave_that_others_can_write_to(tmp_path, capsys):
    """One line says what is wrong with it."""
    tmp_path.chmod(0o777)
    assert main(["serve", "--port", "0", "--autosave", str(tmp_path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"kvcache: {tmp_path}: expected a secret, or a directory of this user")
    assert lines[0].endswith("with mode 0777")


@pytest.fixture
def served(monkeypatch):
    """The models of each server that would run, and whatever makes it ends."""
    found = []

    def make_app(models, keys, **limits):
        found.append([slot.model for slot in models])
        return Mock()

    monkeypatch.setattr("kvcache.server.app.make_app", make_app)
    monkeypatch.setattr("kvcache.server.process.run", lambda *arguments: None)
    return found


def test_without_jinja2_it_says_at_once_that_chats_are_refused(served, capsys, monkeypatch):
    assert main(["serve", "--port", "0"]) == 0
    assert "chats" not in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "jinja2", None)
    template_sandbox._compiled_or_refused.cache_clear()
    assert main(["serve", "--port", "0"]) == 0
    first, *_ = capsys.readouterr().err.splitlines()
    assert first.startswith("serving completions and no chats: a chat template needs the package jinja2, 3.1.6 or")
    assert len(served) == 2


def test_the_default_cache_is_as_large_as_contexts_and_memory_allow(served, capsys, monkeypatch):
    """A line at the start tells its size and the options that change it; several models share the memory."""
    available = 64 << 30
    for module in ("commands.serve", "support.machine_memory"):
        monkeypatch.setattr(f"kvcache.{module}.machine_memory", lambda: MachineMemory(64 << 30, available))
    assert main(["serve", "--port", "0"]) == 0
    ((model,),) = served
    assert (model.engine.max_prompt, model.engine.total_tokens) == (2048, 4 * 2048 + 16)
    assert re.search(
        r"demo: 2,048 tokens of context at most, 8,208 for all texts together, which take [\d.]+ MiB of keys and\s+"
        r"values \(64.00 GiB are available\); --context or --max-memory changes that\n",
        capsys.readouterr().err,
    )
    bytes_of_a_block = model.engine.memory()["kv"] // 513
    for models, options, blocks in (
        (1, [], 40), (2, ["--preload"], 20), (1, ["--max-memory", "25%"], 20), (1, ["--context", "160"], 11)
    ):
        available = 80 * bytes_of_a_block + 1000
        served.clear()
        monkeypatch.setattr("kvcache.__main__.configured", partial(twice, models))
        assert main(["serve", "--port", "0", "--config", "x", *options]) == 0
        assert [each.engine.total_tokens for each in served[0]] == [16 * blocks] * models


def twice(count, path, parser, parse):
    options = parse()
    options.tables = [argparse.Namespace(**vars(options) | {"name": f"m{i}"}) for i in range(count)]
    return options


def test_a_large_network_gets_as_many_tokens_as_agents_send(monkeypatch):
    """At most 131,072, where there is memory for these."""
    monkeypatch.setattr("kvcache.commands.options.checkpoint_positions", lambda model: 262_144)
    assert default_sizes("any", "25%") == {"num_blocks": 8193, "max_memory_bytes": "25%"}


def test_a_chat_template_of_a_file(served, tmp_path, capsys):
    file = tmp_path / "words.jinja"
    file.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    assert main(["serve", "--port", "0", "--chat-template", str(file)]) == 0
    ((model,),) = served
    talk = [{"role": "user", "content": "x"}]
    assert model.engine.apply_chat_template(talk) == model.engine.apply_chat_template(talk, tools=[]) == "<user>x"
    for content, message in ((b"\xff", "expected a Jinja template in UTF-8"), (b" ", "expected a Jinja template, got")):
        file.write_bytes(content)
        for command in ("serve", "chat"):
            assert main([command, "--model", "nowhere" if command == "serve" else str(DIRECTORY), "--chat-template",
                         str(file)]) == 2
            assert f"kvcache: --chat-template: {message}" in capsys.readouterr().err
    assert main(["serve", "--chat-template", str(tmp_path / "none")]) == 2
    assert str(tmp_path / "none") in capsys.readouterr().err


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs tomllib")
def test_tables_of_models_in_a_file(tmp_path, capsys):
    """One with another number of brackets or another name is told the right one."""
    for content, got in (
        ('[model]\npath = "x"', "[model]"), ('[models]\npath = "x"', "[models]"),
        ('[[models]]\npath = "x"', "models"), ('models = ["x"]', "models"),
    ):
        (tmp_path / "server.toml").write_text(content)
        assert main(["serve", "--config", str(tmp_path / "server.toml")]) == 2
        said = capsys.readouterr().err
        assert said == f"kvcache: --config: expected a table [[model]] for each model, got {got}\n"


def test_names_of_adapters(tmp_path, capsys, monkeypatch):
    adapter = write_adapter(tmp_path / "a", modules_of(DIRECTORY, ("q_proj",)))
    monkeypatch.chdir(tmp_path)
    for options, message in (
        (["--adapter", "x=a", "--adapter", "x=a"], "--adapter: expected NAME=PATH, each name once, got 'x=a'"),
        (["--adapter", "m=a", "--name", "m"], "--adapter: expected another name than the model's, got 'm'"),
        (["--adapter", "m=a", "--served-name", "m"], "--adapter: expected another name than the model's, got 'm'"),
        (["--adapter", " =a"], "--adapter: expected a name of 1 to 200 characters"),
    ):
        assert main(["serve", "--port", "0", *options]) == 2
        assert message in capsys.readouterr().err
    write_adapter(adapter, modules_of(DIRECTORY, ("q_proj",)), use_dora=True)
    assert main(["serve", "--port", "0", "--adapter", "x=a"]) == 2
    assert "use_dora: expected none, since it is not supported, got True" in capsys.readouterr().err


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs tomllib")
def test_faults_of_models_that_load_later(tmp_path, capsys):
    """They are found at the start, before the first one loads."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    for top, own, message in (
        ("", 'tool_parser = "x"', "tool_parser: expected "), ("", 'weights = "q9"', "weights: expected one of "),
        ("", 'calibrate = "nowhere"', "calibrate: expected "), ("", 'draft = ["nowhere"]', "expected a folder with"),
        ("", 'chat_template = "nowhere"', "nowhere"), ("", 'dtype = "q9"', "dtype: expected one of "),
        ("max_loaded = 1", "preload = true", "max_loaded: expected 2 at least, of models that load at the start"),
        ("max_loaded = 1", "pin = true", "max_loaded: expected 2 at least, of "),
        ("", 'adapter = ["x=nowhere"]', "adapter: expected a local checkpoint directory"),
        ("", 'adapter = "x"', "adapter: expected a list of texts"),
        ('adapter = ["x=nowhere"]', "", "in the tables [[model]] alone, got another"),
        ('kv_events = "tcp://127.0.0.1:5557"', "", "kv_events: expected an address for each model, got "),
    ):
        first = 'preload = true' if "preload" in own else ""
        file = f"{top}\nport = 0\n[[model]]\npath = '{DIRECTORY}'\nname = 'a'\n{first}\n"
        (tmp_path / "x.toml").write_text(file + f"[[model]]\npath = '{DIRECTORY}'\nname = 'b'\n{own}\n")
        assert main(["serve", "--config", str(tmp_path / "x.toml")]) == 2, own
        assert message in capsys.readouterr().err.replace("--tool-parser", "tool_parser").replace(
            "--max-loaded", "max_loaded").replace("--kv-events", "kv_events").replace("--", ""), own
    for path in ("nowhere", tmp_path / "empty"):
        (tmp_path / "x.toml").write_text(file.replace(top, "") + f"[[model]]\npath = '{path}'\nname = 'b'\n")
        assert main(["serve", "--config", str(tmp_path / "x.toml")]) == 2
        assert str(path) in capsys.readouterr().err
    assert name_of("hf:o/r:sub/x.gguf") == "x"
    assert name_of("/models/llama3:8b.gguf") == "llama3:8b"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs tomllib")
def test_the_files_of_agents_in_the_guide_fit_its_command():
    """They ask the paths that a server has, for the model, the context and the tokens that the command says."""
    import tomllib

    guide = (PROJECT / "kvcache" / "guides" / "agents.md").read_text("utf-8").partition("## Three programs")[2]
    command, codex, *others = re.findall(r"(?s)```(?:sh|toml|json)\n(.*?)```", guide.partition("\n## ")[0])
    options = dict(re.findall(r"--(\S+) (\S+)", command))
    name, context, most = options["name"], int(options["context"]), int(options["max-tokens"])
    codex, (claude, opencode) = tomllib.loads(codex), map(json.loads, others)
    base = "http://127.0.0.1:8000"
    provider = codex["model_providers"][codex["model_provider"]]
    assert (provider["base_url"], provider["wire_api"]) == (f"{base}/v1", "responses")
    assert (codex["model"], codex["model_context_window"]) == (name, context)
    assert codex["model_auto_compact_token_limit"] + most < context
    claude = claude["env"]
    assert claude["ANTHROPIC_BASE_URL"] == base
    assert {value for variable, value in claude.items() if variable.endswith("_MODEL")} == {name}
    assert int(claude["CLAUDE_CODE_MAX_OUTPUT_TOKENS"]) == most
    assert int(claude["CLAUDE_CODE_AUTO_COMPACT_WINDOW"]) + most < context
    ((own, provider),) = opencode["provider"].items()
    assert {opencode["model"], opencode["small_model"]} == {f"{own}/{name}"}
    assert provider["options"]["baseURL"] == f"{base}/v1"
    assert provider["models"][name]["limit"] == {"context": context, "output": most}


def test_block_events(monkeypatch, capsys):
    """The options reach the engine, and the address that the system chose is printed."""
    told = []

    def make_app(models, keys, **limits):
        told.append(models[0].model.engine.kv_events)
        return Mock()

    def run(*arguments):
        (settings,) = told
        assert (settings.topic, settings.medium, settings.rank, settings.unsalted) == ("kv@a", "cpu", 2, True)
        with Reader(settings) as reader:
            assert reader.replay(0)

    monkeypatch.setattr("kvcache.server.app.make_app", make_app)
    monkeypatch.setattr("kvcache.server.process.run", run)
    addresses = ["--kv-events", "tcp://127.0.0.1:*", "--kv-events-replay", "tcp://127.0.0.1:*"]
    names = ["--kv-events-topic", "kv@a", "--kv-events-medium", "cpu", "--kv-events-rank", "2", "--kv-events-unsalted"]
    assert main(["serve", "--port", "0", *addresses, *names]) == 0
    assert f"demo: block events at {told[0].address}\n" in capsys.readouterr().out
    assert ":*" not in told[0].address + told[0].replay
