"""`kvcache verify`: certificates of two machines, servers cold and warm, and what it refuses."""

import json
import re
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from places import GOLDEN

from kvcache.__main__ import main
from kvcache.certificates.certificate import IDENTITY, Certificate

pytestmark = pytest.mark.one_build

COLD = ["verify", "--model", str(GOLDEN / "llama"), "--way", "cold"]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    path = tmp_path_factory.mktemp("verify") / "here.json"
    assert main([*COLD, "--prompts", "2", "--json", str(path)]) == 0
    return path


def test_a_certificate_against_itself(certificate, capsys):
    """The prompts that both have are compared; another level of this CPU has the same certificate."""
    assert main([*COLD, "--prompts", "3", "--against", str(certificate)]) == 0
    assert "\nequal: 2 prompts, of 3 here and 2 there\n" in capsys.readouterr().out
    content = json.loads(certificate.read_text())
    assert {*IDENTITY, "cpu", "level", "digest", "equal", "ways", "prompts"} <= {*content}
    for level in [each for each in content["levels"] if each != content["level"]][-1:]:
        assert main([*COLD, "--prompts", "2", "--way", f"level {level}"]) == 0
        out = capsys.readouterr().out
        assert re.search(rf"(?m)^level {level} +2 +191  equal$", out)
        assert f"digest {content['digest']} of 2 prompts" in out


def test_one_bit_of_another_machine(certificate, tmp_path, capsys):
    """A record with another digest differs; one whose digest was not made again is no certificate."""
    content = json.loads(certificate.read_text())
    step = content["prompts"][1]["steps"][3]
    content["prompts"][1]["steps"][3] = f"{int(step, 16) ^ 1:016x}"
    file = tmp_path / "there.json"
    file.write_text(json.dumps(content))
    assert main([*COLD, "--prompts", "2", "--against", str(file)]) == 2
    assert "expected the digests of its answers, got others" in capsys.readouterr().err
    good = Certificate.read(certificate)
    first, second = good.records
    other = replace(second, steps=tuple(content["prompts"][1]["steps"]))
    replace(good, records=(first, other), machine={**good.machine, "cpu": "a\x1b[2J"}).write(file)
    assert main([*COLD, "--prompts", "2", "--against", str(file)]) == 1
    out = capsys.readouterr().out
    assert "\nagainst a^[[2J, " in out
    assert "\ndifferent: prompt 1: logits of new token 3: log-probability -" in out


def test_certificates_that_do_not_compare(certificate, tmp_path, capsys):
    """Each part of the identity is refused by its name, before anything is computed."""
    good, file = Certificate.read(certificate), tmp_path / "other.json"
    for name, words in IDENTITY.items():
        replace(good, identity={**good.identity, name: "x\x1b[2J"}).write(file)
        assert main([*COLD, "--against", str(file)]) == 2
        error = capsys.readouterr().err
        assert f"against: expected a certificate of {words} " in error
        assert error.endswith("got x^[[2J\n")
    for text in ("", "[]", "{}", "x", certificate.read_text().replace('"prompts": [', '"prompts": 1, "p": [')):
        file.write_text(text)
        assert main([*COLD, "--against", str(file)]) == 2
        assert "other.json: expected a certificate, got " in capsys.readouterr().err
    content = json.loads(certificate.read_text())
    file.write_text(json.dumps({**content, "prompts": []}))
    assert main([*COLD, "--against", str(file)]) == 2
    assert "expected at least one, got none" in capsys.readouterr().err


def test_ways_that_have_no_time(capsys):
    """Nothing that was not compared is equal: the status says so."""
    assert main(["verify", "--seconds", "1e-6", "--way", "in pieces"]) == 3
    out = capsys.readouterr().out
    assert "in pieces        0       0  not compared; 1 not: no time\n" in out
    assert "\nnot compared: in pieces; " in out
    assert " equal" not in out


def test_options_that_exclude_each_other(capsys):
    for options, error in (
        (["--server", "http://x", "--prompts", "2"], "--prompts: expected none with --server, got 2"),
        (["--words", "2"], "--words: expected --server beside it, got 2"),
        (["--server", "x"], "--server: expected a URL such as http://127.0.0.1:8000/v1, got "),
        (["--server", "http://["], "--server: expected a URL such as http://127.0.0.1:8000/v1, got "),
        (["--server", "http://"], "--server: expected a URL such as http://127.0.0.1:8000/v1, got "),
        (["--server", "http://x:y"], "--server: expected a URL such as http://127.0.0.1:8000/v1, got "),
        (["--server", "http://x", "--dtype", "q4"], "--dtype: expected none with --server, got q4"),
        (["--server", "http://x", "--threads", "1"], "--threads: expected none with --server, got 1"),
        (["--json", "missing/x.json"], "--json: expected a file in a folder that exists, got missing/x.json"),
        (["--seconds", "0"], "--seconds: expected "),
        (["--way", "x"], "--way: expected the beginning of one of cold, "),
    ):
        assert main(["verify", *options]) == 2
        assert error in capsys.readouterr().err


# -- servers --------------------------------------------------------------------------------------------------


class Scripted(BaseHTTPRequestHandler):
    """A server whose answers to a prompt that it knows have other log-probabilities, other tokens, or the same."""

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        if self.server.path == "no HTTP":
            self.wfile.write(b"220 mail\r\n\r\n")
            return
        self._answer({"data": [{"id": "scripted"}]})

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not self.path.endswith(server.path):
            self.send_error(404)
            return
        prompt = body.get("prompt") or body["messages"][0]["content"]
        known = prompt in server.known
        server.known.add(prompt)
        last, value = server.warm if known else ("c", -0.5)
        tokens, values = ["a", "b", last], [-0.25, -0.5, value]
        if self.path.endswith("chat/completions"):
            objects = [
                {"token": token, "logprob": each, "top_logprobs": [{"token": token, "logprob": each}]}
                for token, each in zip(tokens, values, strict=True)
            ]
            choice = {"message": {"content": "".join(tokens)}, "logprobs": {"content": objects}}
        else:
            tops = [{token: each} for token, each in zip(tokens, values, strict=True)]
            lists = {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops}
            choice = {"text": "".join(tokens), "logprobs": lists if server.has_logprobs else None}
        details = {} if server.cached is None else {"prompt_tokens_details": {"cached_tokens": server.cached * known}}
        self._answer({"choices": [choice], "usage": details})

    def _answer(self, content):
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def scripted(warm=("c", -0.5), cached=7, has_logprobs=True, path="v1/completions"):
    with ThreadingHTTPServer(("127.0.0.1", 0), Scripted) as server:
        server.warm, server.cached, server.has_logprobs, server.path = warm, cached, has_logprobs, path
        server.known = set()
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_servers_cold_and_warm(capsys):
    """Columns: answers, flipped, moved, largest difference, first token that differs, cached, verdict."""
    for status, row, options in (
        (0, "2 0 0 0 - 14 equal", {}),
        (0, "2 0 0 0 - - equal", {"cached": None}),
        (3, "2 0 0 0 - 0 not compared; no hit", {"cached": 0}),
        (1, "2 0 2 0.125 - 14 different", {"warm": ("c", -0.625)}),
        (1, "2 2 2 0 2 14 different", {"warm": ("d", -0.5)}),
        (1, "2 2 2 unknown 2 14 different", {"warm": ("d", -0.5), "has_logprobs": False}),
        (1, "2 0 2 0.125 - 14 different", {"warm": ("c", -0.625), "path": "chat/completions"}),
    ):
        with scripted(**options) as url:
            assert main(["verify", "--server", url, "--requests", "2", "--words", "3"]) == status
        lines = capsys.readouterr().out.splitlines()
        for way in ("the same prompt again", "behind others with its beginning", "all prompts at once"):
            want = "2 0 0 0 - 0 equal" if status == 3 and way == "all prompts at once" else row
            assert next(" ".join(line.removeprefix(way).split()) for line in lines if line.startswith(way)) == want


def test_servers_that_fail(capsys):
    with scripted(path="nowhere") as url:
        assert main(["verify", "--server", url]) == 2
        assert "expected an answer to /completions or /chat/completions, got " in capsys.readouterr().err
    assert main(["verify", "--server", url]) == 2
    assert ": expected a server, got " in capsys.readouterr().err
    with scripted(path="no HTTP") as url:
        assert main(["verify", "--server", url]) == 2
        assert ": expected an answer of HTTP, got BadStatusLine(" in capsys.readouterr().err
