"""Requests and chunks of Dynamo, without Dynamo."""

import json
import sys

import pytest

from kvcache import BatchEngine, SamplingParams, TokenLogprobs
from kvcache.demo import DIRECTORY
from kvcache.errors import GrammarError
from kvcache.integrations.dynamo.__main__ import main
from kvcache.integrations.dynamo.dynamo_options import engine_of, options_of
from kvcache.integrations.dynamo.token_request import TokenRequest, chunk_of, end_of

pytestmark = pytest.mark.one_build
DEFAULTS = SamplingParams(temperature=0.6, top_k=20, stop_token_ids=(7,))


@pytest.fixture(scope="module")
def engine():
    return BatchEngine.from_pretrained(DIRECTORY, num_blocks=40)


def request(**more):
    return TokenRequest.of({"token_ids": [1, 2, 3], **more}, DEFAULTS, 100)


def test_a_request_that_says_nothing():
    assert request() == TokenRequest([1, 2, 3], DEFAULTS.changed({"max_tokens": 97}), 1, None)
    empty = {"sampling_options": None, "stop_conditions": {}, "output_options": None, "routing": None}
    assert request(**empty) == request()


def test_all_that_is_served():
    found = request(
        sampling_options={
            "n": 3, "best_of": 3, "temperature": 0.0, "top_p": 0.5, "top_k": -1, "min_p": 0.1, "seed": 5,
            "presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.1, "use_beam_search": False,
        },
        stop_conditions={"max_tokens": 5, "stop": ["x"], "stop_token_ids": [8], "stop_token_ids_hidden": [9]},
        output_options={"logprobs": 2, "skip_special_tokens": True}, routing={"cache_salt": "a", "dp_rank": 0},
    )
    want = SamplingParams(
        temperature=0.0, top_p=0.5, top_k=0, min_p=0.1, seed=5, presence_penalty=0.5, frequency_penalty=0.25,
        repetition_penalty=1.1, max_tokens=5, stop_token_ids=(7, 8, 9), logprobs=2,
    )
    assert found == TokenRequest([1, 2, 3], want, 3, "a")
    assert request(extra_args={"cache_salt": "b"}).namespace == "b"


@pytest.mark.parametrize(("wrong", "message"), [
    ({"token_ids": "a"}, "token_ids: expected"),
    ({"prefill_result": {"a": 1}}, "prefill_result: expected"),
    ({"multi_modal_data": {"image": []}}, "multi_modal_data: expected"),
    ({"sampling_options": {"use_beam_search": True}}, "use_beam_search: expected False, got True"),
    ({"sampling_options": {"n": 0}}, "n: expected an int >= 1"),
    ({"sampling_options": {"n": 2, "best_of": 4}}, "best_of: expected 2, as n, got 4"),
    ({"sampling_options": {"guided_decoding": {"json": {}, "regex": "a"}}}, "guided_decoding: expected one of"),
    ({"sampling_options": {"guided_decoding": {"structural_tag": "x"}}}, "guided_decoding: expected one of"),
    ({"sampling_options": {"guided_decoding": {"choice": []}}}, "choice: expected a list of texts"),
    ({"sampling_options": {"guided_decoding": {"regex": 5}}}, "regex: expected"),
    ({"stop_conditions": {"ignore_eos": True}}, "ignore_eos: expected False, got True"),
    ({"stop_conditions": {"min_tokens": 3}}, "min_tokens: expected 0, got 3"),
    ({"output_options": {"prompt_logprobs": 1}}, "prompt_logprobs: expected None, got 1"),
    ({"routing": {"cache_salt": 5}}, "cache_salt: expected"),
])
def test_what_is_refused(wrong, message):
    with pytest.raises((TypeError, ValueError, GrammarError), match=message):
        request(**wrong)


def test_a_probe():
    probe = {"_HEALTH_CHECK": True, "stop_conditions": {"max_tokens": 1, "ignore_eos": True}}
    assert request(**probe).params.max_tokens == 1


@pytest.mark.parametrize(("guided", "good"), [
    ({"json": {"type": "integer", "maximum": 9}}, lambda text: int(text) <= 9),
    ({"json": '{"type": "boolean"}', "whitespace_pattern": ""}, lambda text: text in ("true", "false")),
    ({"regex": "(ab)+", "backend": "auto"}, lambda text: text.replace("ab", "") == ""),
    ({"choice": ["a.b (c)", "Größe?"], "json": None}, lambda text: text in ("a.b (c)", "Größe?")),
    ({"grammar": 'start: "x" "y"'}, lambda text: text == "xy"),
    ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
])
def test_guided_decoding(engine, guided, good):
    pytest.importorskip("llguidance")
    how = {"guided_decoding": guided, "temperature": 0.0}
    params = request(sampling_options=how, stop_conditions={"max_tokens": 60}).params
    text = engine.tokenizer.decode(engine.submit("answer: ", params).result())
    assert good(text), text


def test_chunks():
    logprobs = [TokenLogprobs(-0.5, {3: -0.5, 4: -1.0})]
    texts = {3: "é", 4: "\ufffd"}
    assert chunk_of(1, [3], logprobs, texts.get) == {
        "token_ids": [3], "index": 1, "log_probs": [-0.5], "top_logprobs": [[
            {"rank": 1, "token_id": 3, "token": "é", "logprob": -0.5, "bytes": [0xC3, 0xA9]},
            {"rank": 2, "token_id": 4, "token": "\ufffd", "logprob": -1.0},
        ]],
    }
    assert chunk_of(0, [3, 4], None, texts.get) == {"token_ids": [3, 4], "index": 0}
    end = end_of("deadline", 10, 4, 6)
    assert end["finish_reason"] == "length"
    assert end["completion_usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert end["completion_usage"]["total_tokens"] == 16


def test_options(tmp_path):
    model = ["--model", DIRECTORY]
    for wrong, message in (
        (["--num-blocks", "0"], "num_blocks: expected an int >= 1"),
        (["--store", "a", "--redis", "redis://x"], "redis: expected none beside --store"),
        (["--redis", "redis://x"], "secret: expected a file beside --redis"),
        (["--secret", "x"], "secret: expected a file beside --redis"),
        (["--store-bytes", "many"], "store_bytes: expected"),
    ):
        with pytest.raises(ValueError, match=message):
            options_of([*map(str, model), *wrong])
    with pytest.raises(FileNotFoundError, match=r"expected config\.json"):
        options_of(["--model", str(tmp_path)])
    options = options_of([*map(str, model), "--store", str(tmp_path), "--num-blocks", "30", "--store-bytes", "1GiB"])
    assert (options.name, options.store_bytes) == ("demo", 1 << 30)
    engine, tiers = engine_of(options)
    with engine:
        assert engine.kv_events.address.startswith("tcp://127.0.0.1:")
        assert engine.tiers is tiers
        engine.submit("def walk(path):\n" * 30, max_tokens=1).result()
    tiers.close()
    assert any(path.is_file() for path in tmp_path.rglob("*") if path.name != "secret")


def test_without_dynamo(monkeypatch):
    monkeypatch.setitem(sys.modules, "dynamo", None)
    with pytest.raises(ImportError, match=r"ai-dynamo 1\.6\.1"):
        main(["--model", str(DIRECTORY)])
