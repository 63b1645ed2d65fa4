"""Conversations of twelve turns over each interface: a scripted network's thoughts, calls and cuts are history.

Codex, Claude Code and opencode play the same script where their programs are: KVCACHE_AGENTS names the folder.
"""

import json
import os
import shutil
from dataclasses import replace
from types import SimpleNamespace

import anthropic
import openai
import pytest
from agent_script import TURNS, AgentScript, agent_folder

from bench.serving.agents_cli import AGENTS, configure, serving, turn
from kvcache import BatchEngine

pytestmark = pytest.mark.one_build

MODEL = "m"
SHELL = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
MOST_STEPS = 4  # answers of a turn
SECONDS = 120.0  # of a turn of a program, many times what it takes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return agent_folder(tmp_path_factory.mktemp("agents") / "network")


@pytest.fixture
def scripted(folder):
    """Makes a server of the script: its address, and the status of each answer by its path."""
    engine = BatchEngine.from_pretrained(folder, num_blocks=12_000)
    statuses = []

    def watched(app):
        async def run(scope, receive, send):
            async def noted(message):
                if message["type"] == "http.response.start":
                    statuses.append((scope["path"], message["status"]))
                await send(message)

            await app(scope, receive, noted)

        return run

    def make(*script):
        engine.sampling_params = replace(
            engine.sampling_params, logits_processor=AgentScript(engine.tokenizer, *script)
        )
        return serving(engine, watched)

    return SimpleNamespace(make=make, statuses=statuses, engine=engine)


def refused(statuses):
    return [(path, status) for path, status in statuses if status >= 400]


def result_of(name, arguments):
    """The result that a careful agent gives a call."""
    try:
        asked = json.loads(arguments) if isinstance(arguments, str) else arguments
        return f"ran {asked['command']}" if name == "shell" else f"error: no function {name}"
    except (ValueError, KeyError, TypeError):
        return "error: the arguments are no JSON of the function"


class Chat:
    """`/v1/chat/completions` by OpenAI's client, whole answers and streams in turn."""

    def __init__(self, url):
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
        self._tools = [{"type": "function", "function": {"name": "shell", "parameters": SHELL}}]
        self._messages, self._streams = [], False

    def tell(self, words):
        self._messages.append({"role": "user", "content": words})

    def answer(self):
        """One answer: its text, and whether calls were answered."""
        asked = {"model": MODEL, "messages": self._messages, "tools": self._tools, "max_tokens": 300}
        self._streams = not self._streams
        if self._streams:
            with self._client.chat.completions.stream(**asked) as stream:
                message = stream.get_final_completion().choices[0].message
        else:
            message = self._client.chat.completions.create(**asked).choices[0].message
        self._messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        for call in message.tool_calls or []:
            result = result_of(call.function.name, call.function.arguments)
            self._messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return message.content or "", bool(message.tool_calls)


class Responses:
    """`/v1/responses` by OpenAI's client: the items of an answer are part of the next input as they came."""

    def __init__(self, url):
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
        self._tools = [{"type": "function", "name": "shell", "parameters": SHELL}]
        self._input = []

    def tell(self, words):
        self._input.append({"role": "user", "content": words})

    def answer(self):
        got = self._client.responses.create(
            model=MODEL, input=self._input, tools=self._tools, max_output_tokens=300, store=False
        )
        self._input += [item.model_dump(exclude_none=True) for item in got.output]
        calls = [item for item in got.output if item.type == "function_call"]
        for call in calls:
            result = result_of(call.name, call.arguments)
            self._input.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
        return got.output_text, bool(calls)


class Messages:
    """`/v1/messages` by Anthropic's client."""

    def __init__(self, url):
        self._client = anthropic.Anthropic(base_url=url, api_key="x", max_retries=0)
        self._tools = [{"name": "shell", "input_schema": SHELL}]
        self._messages = []

    def tell(self, words):
        self._messages.append({"role": "user", "content": words})

    def answer(self):
        got = self._client.messages.create(model=MODEL, messages=self._messages, tools=self._tools, max_tokens=300)
        self._messages.append({"role": "assistant", "content": [block.model_dump() for block in got.content]})
        calls = [block for block in got.content if block.type == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": result_of(call.name, call.input)}
            for call in calls
        ]
        if results:
            self._messages.append({"role": "user", "content": results})
        return "".join(block.text for block in got.content if block.type == "text"), bool(calls)


@pytest.mark.parametrize("interface", [Chat, Responses, Messages])
def test_clients_play_twelve_turns(scripted, interface):
    with scripted.make() as url:
        agent = interface(url)
        for number, expected in enumerate(TURNS, 1):
            agent.tell(f"TURN-{number:02}")
            for _ in range(MOST_STEPS):
                text, called = agent.answer()
                if not called:
                    break
            cut = [expected.answers[0][0]] if expected.is_cut else []  # an agent may take what was left for the answer
            assert text.strip() in (expected.said, *cut), (number, text)
    assert not refused(scripted.statuses)
    assert scripted.engine.stats().running == 0


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.program)
def test_programs_play_twelve_turns(scripted, agent, tmp_path):
    program = shutil.which(agent.program, path=os.environ.get("KVCACHE_AGENTS"))
    if program is None:
        pytest.skip(f"needs {agent.program}: npm install @openai/codex @anthropic-ai/claude-code opencode-ai")
    with scripted.make(agent.shell, agent.arguments) as url:
        variables = configure(tmp_path, url, context=100_000, output=300)
        for number, expected in enumerate(TURNS, 1):
            command = [program, *agent.words(f"TURN-{number:02}", number == 1)]
            wrote = turn(command, tmp_path, variables, SECONDS)
            assert expected.said in wrote or expected.is_cut, (number, wrote[-2000:])
    assert not refused(scripted.statuses)
