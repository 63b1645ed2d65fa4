"""The tiers that options of `serve` open: a folder, a Redis server or an object store that is shared, their secret."""

import argparse
import os
import stat
import time
from unittest.mock import Mock

import pytest
from redis_programs import expect_redis

from bench.support.redis_servers import Server
from kvcache import BatchEngine, SamplingParams
from kvcache.__main__ import main
from kvcache.commands.shared_tiers import VARIABLE, add_tiers, check_tiers, open_tiers
from kvcache.demo import DIRECTORY

pytest.importorskip("redis")
pytestmark = pytest.mark.one_build
GREEDY = SamplingParams(temperature=0.0, max_tokens=2)


def options(*arguments):
    parser = argparse.ArgumentParser()
    add_tiers(parser)
    return parser.parse_args([str(each) for each in arguments])


@pytest.fixture
def secret(tmp_path):
    (tmp_path / "secret").write_bytes(b"sixteen bytes or more\n")
    return tmp_path / "secret"


@pytest.fixture
def redis(tmp_path):
    expect_redis()
    server = Server(tmp_path / "redis")
    yield server
    server.process.kill()
    server.process.wait()


def prompts(count):
    return [[1 + (7 * number + i * i) % 4000 for i in range(400)] for number in range(count)]


def test_two_servers_with_one_secret_share_what_they_compute(secret, redis, tmp_path, monkeypatch):
    """A server waits 50 ms for a tier, so on a busy machine some of the prompts may be computed."""
    pytest.importorskip("uvicorn")
    (tmp_path / "other").write_bytes(b"another secret of 24 byte")
    found = []

    def make_app(models, keys, **limits):
        requests = [models[0].model.engine.submit(prompt, GREEDY) for prompt in prompts(6)]
        answers = [each.result() for each in requests]
        found.append((answers, max(each.metrics.cached_tokens for each in requests)))
        return Mock()

    monkeypatch.setattr("kvcache.server.app.make_app", make_app)
    monkeypatch.setattr("kvcache.server.process.run", lambda *arguments: None)
    url = f"redis://127.0.0.1:{redis.port}/0"
    common = ["serve", "--port", "0", "--num-blocks", "400", "--tier-secret"]
    assert main([*common, str(secret), "--redis", url]) == 0  # at its end it has written all
    monkeypatch.setenv(VARIABLE, url)
    for file in ("secret", "other"):
        assert main([*common, str(tmp_path / file)]) == 0
    (first, none), (second, cached), (third, nothing) = found
    assert first == second == third
    assert none == nothing == 0
    assert cached >= 256


def test_a_folder_before_the_server(secret, tmp_path):
    folder = tmp_path / "kept"
    assert open_tiers(options()) is None
    given = () if os.name == "posix" else ("--tier-secret", secret)  # without one Windows is refused
    with open_tiers(options("--autosave", folder, *given)) as tiers:
        assert [type(stats).__name__ for stats in tiers.stats()] == ["TierStats"]
    both = ["--autosave", folder, "--tier-secret", secret, "--redis", "redis://127.0.0.1:1/0"]
    with open_tiers(options(*both)) as tiers:
        assert repr(tiers).startswith("Tiers(DirectoryTier(")
        assert "RedisTier" in repr(tiers)
        began = time.monotonic()
        with BatchEngine.from_pretrained(DIRECTORY, tiers=tiers, num_blocks=100) as engine:  # nothing listens there
            assert len(engine.submit(prompts(1)[0], GREEDY).result()) == 2
        assert time.monotonic() - began < 30
    assert stat.S_ISDIR(folder.stat().st_mode)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--redis", "redis://host"], "tier_secret: expected a file beside --redis, got none"),
        (["--object-store", "s3://b"], "tier_secret: expected a file beside --object-store, got none"),
        (
            ["--tier-secret", "SECRET"],
            "tier_secret: expected --redis, --object-store or --autosave beside it, got none of them",
        ),
        (["--redis", "redis://host", "--tier-secret", "SHORT"], "tier_secret: expected 16 to 64 bytes, got 5"),
    ],
)
def test_what_is_refused(arguments, message, secret, tmp_path):
    (tmp_path / "short").write_bytes(b"short")
    places = {"SECRET": secret, "SHORT": tmp_path / "short"}
    with pytest.raises(ValueError, match=f"^{message}$"):
        check_tiers(options(*[places.get(each, each) for each in arguments]))


def test_an_object_store(secret, tmp_path):
    """A folder stands for one; what is no URL of a store is refused."""
    pytest.importorskip("obstore")
    found = []
    for _ in range(2):
        with (
            open_tiers(options("--tier-secret", secret, "--object-store", f"file://{tmp_path}")) as tiers,
            BatchEngine.from_pretrained(DIRECTORY, tiers=tiers, num_blocks=100) as engine,
        ):
            found.append(engine.submit(prompts(1)[0], GREEDY).result())
            assert tiers.flush(60)
            stored = tiers.stats()[0].stored
    assert found[0] == found[1]
    assert len([*(tmp_path / "kvcache").iterdir()]) == 6
    assert stored == 0
    for url in ("foo", "s3://", "az://container", "file:///nowhere/at/all"):
        with pytest.raises(ValueError, match=r"^object_store: expected a URL such as s3://bucket/folder, got an error"):
            open_tiers(options("--tier-secret", secret, "--object-store", url))
    with pytest.raises(ValueError, match=r"got an error: [^\n]*") as caught:
        open_tiers(options("--tier-secret", secret, "--object-store", "xx://user:hunter2@bucket/x?sig=hunter2"))
    assert "hunter2" not in str(caught.value)


def test_no_message_has_the_password(secret, capsys):
    arguments = ["--redis", "http://:hunter2@host/0", "--tier-secret", str(secret)]
    assert main(["serve", "--port", "0", *arguments]) == 2
    told = capsys.readouterr()
    assert "--redis: expected a URL such as redis://host:6379/0" in told.err
    assert "hunter2" not in told.err + told.out
    assert main(["serve", "--model", "nowhere", "--redis", "redis://host"]) == 2, "before the model is looked for"
    assert "--tier-secret: expected a file beside --redis, got none" in capsys.readouterr().err
