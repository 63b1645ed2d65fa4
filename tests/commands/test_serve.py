"""`kvcache serve`: what it refuses before the model loads, the name of the model, the file of keys."""

import sys
from unittest.mock import Mock

import pytest
from event_reader import Reader

from kvcache.__main__ import main

pytest.importorskip("uvicorn")
pytestmark = [pytest.mark.no_level, pytest.mark.one_build]


@pytest.fixture
def made(monkeypatch):
    """The name and the keys of each application that is made; none is served."""
    found = []

    def make_app(models, keys, **limits):
        found.append((*models, keys))
        raise ValueError

    monkeypatch.setattr("kvcache.commands.serve.open_engine", lambda *arguments, **options: Mock())
    monkeypatch.setattr("kvcache.server.app.make_app", make_app)  # first: it imports what comes after it
    monkeypatch.setattr("kvcache.server.served_model.ServedModel", lambda engine, name, **options: name)
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
        (["--api-keys", "nowhere.txt"], "No such file or directory: 'nowhere.txt'"),
        (["--timeout", "0"], "timeout: expected a finite number above 0, got 0.0"),
        (["--timeout", "inf"], "timeout: expected a finite number above 0, got inf"),
        (["--timeout", "nan"], "timeout: expected a finite number above 0, got nan"),
        (["--max-body", "0"], "--max-body: expected an int >= 1, got 0"),
        (["--max-queue", "0"], "--max-queue: expected an int >= 1, got 0"),
        (["--max-running", "0"], "--max-running: expected an int >= 1, got 0"),
        (["--draft-tokens", "17"], "--draft-tokens: expected an int <= 16, got 17"),
        (["--sparse-tokens", "0"], "--sparse-tokens: expected an int >= 1, got 0"),
        (["--activations", "q8"], "--activations: expected one of int8, exact, bf16, got 'q8'"),
        (["--drain", "-1"], "drain: expected an int >= 0, got -1"),
        (["--kv-events", "5557"], "--kv-events: expected an address such as tcp://127.0.0.1:5557, got '5557'"),
        (["--kv-events", "tcp://127.0.0.1:*", "--kv-events-replay", "x"], "--kv-events-replay: expected an address"),
        (["--kv-events", "tcp://127.0.0.1:*", "--kv-events-rank", "-1"], "--kv-events-rank: expected an int >= 0"),
        (["--kv-events-topic", "x"], "--kv-events-topic: expected --kv-events beside it, got 'x'"),
    ):
        assert main(["serve", "--model", "nowhere", *arguments]) == 2, "before the model is looked for"
        assert message in capsys.readouterr().err
    monkeypatch.setenv("KVCACHE_API_KEYS", "")
    assert main(["serve", "--host", "0.0.0.0"]) == 2
    assert "--api-keys: expected at least one key" in capsys.readouterr().err
    monkeypatch.delitem(sys.modules, "kvcache.server.process")
    monkeypatch.delattr("kvcache.server.process")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve"]) == 2
    assert "kvcache-cpu[serve]" in capsys.readouterr().err


def test_a_folder_of_autosave_that_others_can_write_to(tmp_path, capsys):
    """One line says what is wrong with it."""
    tmp_path.chmod(0o777)
    assert main(["serve", "--port", "0", "--autosave", str(tmp_path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"kvcache: {tmp_path}: expected a secret, or a directory of this user")
    assert lines[0].endswith("with mode 0777")


def test_block_events(monkeypatch, capsys):
    """The options reach the engine, and the address that the system chose is printed."""
    told = []

    def make_app(models, keys, **limits):
        told.append(models[0].engine.kv_events)
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
