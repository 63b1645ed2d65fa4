"""`python -m bench agents-cli`: Codex, Claude Code and opencode against the server: a call, its result, a second turn.

The programs are those of npm: `npm install @openai/codex @anthropic-ai/claude-code opencode-ai`, in a folder whose
`node_modules/.bin` is on PATH or is named by `--programs`. The network is SmolLM2-135M, whose answers are scripted:
what it would say is not the point, that its prompts run is. The second turn continues the conversation of the first.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.engine.smollm2 import find_file
from bench.support.report import show, time_text, write_json
from kvcache import BatchEngine
from kvcache.serving import Request

__all__ = ["AGENTS", "add_arguments", "configure", "main", "serving", "turn"]

_TOLD, _ANSWER = "echo MAGIC$((100+23))", "The tool said MAGIC123."
_HEAD = "<|im_start|>assistant\n"
ASKED = "{}"


@dataclass(frozen=True)
class Agent:
    """A program, how it is asked in a first turn and in later ones, and its shell.

    Attributes:
        first, again: words of its command line; ASKED stands for what the user says.
        shell: the name of the function that runs commands.
        arguments: makes the arguments of that function.
    """

    program: str
    first: tuple[str, ...]
    again: tuple[str, ...]
    shell: str
    arguments: Callable[[str], dict[str, str]]

    def words(self, asked: str, is_first: bool) -> list[str]:
        """The command line of a turn, without the program."""
        return [asked if word == ASKED else word for word in (self.first if is_first else self.again)]


def _bash(told: str) -> dict[str, str]:
    return {"command": told, "description": "x"}


_CODEX = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
_CLAUDE = ("--allowedTools", "Bash")
AGENTS = (
    Agent("codex", (*_CODEX, ASKED), (*_CODEX, "resume", "--last", ASKED), "exec_command", lambda told: {"cmd": told}),
    Agent("claude", ("-p", ASKED, *_CLAUDE), ("-p", ASKED, "--continue", *_CLAUDE), "Bash", _bash),
    Agent("opencode", ("run", ASKED), ("run", "--continue", ASKED), "bash", _bash),
)


class Script:
    """A logits processor: a call if the last message of the user has no result yet, and then an answer."""

    def __init__(self, tokenizer: Any, end: int) -> None:
        self._tokenizer, self._end = tokenizer, end
        self._head = tokenizer.encode(_HEAD).ids
        self._answer = tokenizer.encode(_ANSWER).ids
        self.call: list[int] = []

    def say(self, name: str, arguments: dict[str, str]) -> None:
        """Let the next calls be of this function."""
        call = json.dumps({"name": name, "arguments": arguments})
        self.call = self._tokenizer.encode(f"I look.\n<tool_call>\n{call}\n</tool_call>").ids

    def __call__(self, text: Any, logits: Any) -> None:
        ids, size = [int(token) for token in text], len(self._head)
        at = next(i for i in range(len(ids) - size, -1, -1) if ids[i : i + size] == self._head) + size
        prompt = self._tokenizer.decode(ids[:at])
        said = self._answer if "MAGIC123" in prompt.rpartition("<|im_start|>user")[2] else self.call
        said = [*said, self._end]
        logits[:] = -100.0
        logits[said[min(len(ids) - at, len(said) - 1)]] = 100.0


class Seen:
    """The requests of an engine, in their order."""

    def __init__(self, engine: BatchEngine) -> None:
        self.requests: list[Request] = []
        submit = engine.submit

        def noted(*arguments: Any, **options: Any) -> Request:
            self.requests.append(request := submit(*arguments, **options))
            return request

        engine.submit = noted  # type: ignore[method-assign]


def unchanged(request: Request, earlier: Sequence[Request]) -> int:
    """The tokens of a prompt that an earlier text begins with."""
    prompt = request.works[0].tokens[: request.works[0].num_prompt]
    longest = 0
    for each in earlier:
        other = each.works[0].tokens[: each.works[0].num_tokens]
        size = min(len(other), len(prompt))
        differs = np.flatnonzero(prompt[:size] != other[:size])
        longest = max(longest, int(differs[0]) if len(differs) else size)
    return longest


@contextmanager
def serving(engine: BatchEngine, wrapped: Callable[[Any], Any] = lambda app: app) -> Iterator[str]:
    """A server in this process: its address. `wrapped` makes what it runs from its application."""
    import uvicorn

    from kvcache.server.app import make_app
    from kvcache.server.served_model import ServedModel

    app = make_app([ServedModel(engine, "m", tool_parser="hermes")])
    server = uvicorn.Server(uvicorn.Config(wrapped(app), log_level="warning", lifespan="on"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def configure(home: Path, url: str, context: int = 8192, output: int = 60) -> dict[str, str]:
    """Write what the programs read at home, the tokens of a context and of an answer too; returns their variables."""
    codex, work = home / ".codex", home / "work"
    codex.mkdir()
    work.mkdir()
    (codex / "config.toml").write_text(
        'model = "m"\nmodel_provider = "local"\n[model_providers.local]\nname = "local"\n'
        f'base_url = "{url}/v1"\nwire_api = "responses"\n'
    )
    provider = {
        "npm": "@ai-sdk/openai-compatible", "name": "local", "options": {"baseURL": f"{url}/v1"},
        "models": {"m": {"name": "m", "limit": {"context": context, "output": output}}},
    }
    options = {"provider": {"local": provider}, "model": "local/m", "small_model": "local/m"}
    (work / "opencode.json").write_text(json.dumps(options))
    claude = {"BASE_URL": url, "AUTH_TOKEN": "none", "MODEL": "m", "SMALL_FAST_MODEL": "m"}
    return {"HOME": str(home), "PWD": str(work), **{f"ANTHROPIC_{name}": value for name, value in claude.items()}}


def turn(command: Sequence[str], home: Path, variables: dict[str, str], seconds: float) -> str:
    """Run a program once; returns what it wrote. RuntimeError: it failed."""
    ran = subprocess.run(
        command, cwd=home / "work", env=os.environ | variables, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=seconds,
    )
    if ran.returncode:
        raise RuntimeError(f"{command[0]} ended with {ran.returncode}: {(ran.stderr or ran.stdout)[-500:]}")
    return ran.stdout


def rows_of(agent: Agent, program: str, url: str, script: Script, seen: Seen, seconds: float) -> list[list[str]]:
    """Two turns of an agent: a row for each request with tools."""
    rows = []
    script.say(agent.shell, agent.arguments(_TOLD))
    seen.requests.clear()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        variables = configure(home, url)
        for number, asked in enumerate(("Say hi", "And again"), 1):
            words = agent.words(asked, number == 1)
            before = len(seen.requests)
            wrote = turn([program, *words], home, variables, seconds)
            answered = "MAGIC123" in wrote
            for i, request in enumerate(seen.requests[before:], before):
                metrics, same = request.metrics, unchanged(request, seen.requests[:i])
                share = f"{metrics.cached_tokens / same:.1%}" if same else "-"
                counts = [metrics.prompt_tokens, same, metrics.cached_tokens]
                first = "-" if metrics.ttft is None else time_text(metrics.ttft)
                told = "yes" if answered else "NO"
                rows.append([agent.program, str(number), *(f"{each:,}" for each in counts), share, first, told])
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument("--programs", type=Path, metavar="DIR", help="node_modules/.bin; by default PATH")
    parser.add_argument("--only", choices=[agent.program for agent in AGENTS], help="one of the agents")
    parser.add_argument("--seconds", type=float, default=300.0, help="of a turn, at most (default 300)")


def main(options: argparse.Namespace) -> int:
    """Print a table; 1 if a second turn found less than 95 % of what did not change, or a result was not read."""
    path = None if options.programs is None else str(options.programs.absolute())
    asked = [agent for agent in AGENTS if options.only in (None, agent.program)]
    found = [(agent, program) for agent in asked if (program := shutil.which(agent.program, path=path))]
    if not found:
        print("\nNone of codex, claude and opencode is installed.")
        return 0
    engine = BatchEngine.from_pretrained(find_file(), dtype="q8", num_blocks=2800)
    (end,) = engine.tokenizer.encode("<|im_end|>").ids
    script, seen = Script(engine.tokenizer, end), Seen(engine)
    engine.sampling_params = replace(engine.sampling_params, logits_processor=script)
    rows: list[list[str]] = []
    with serving(engine) as url:
        for agent, program in found:
            rows += rows_of(agent, program, url, script, seen, options.seconds)
    heads = ["agent", "turn", "tokens of prompt", "unchanged", "cached", "share", "first token", "read the result"]
    show(options.markdown, "SmolLM2-135M, q8, requests of two turns", heads, rows)
    write_json(options.json, requests=[dict(zip(heads, row, strict=True)) for row in rows])
    later = [row for row in rows if row[1] == "2" and row[5] != "-"]
    short = [row for row in later if float(row[5][:-1]) < 95] + [row for row in rows if row[7] == "NO"]
    agents = len({row[0] for row in later})
    print(f"\n{agents} of {len(found)} agents had a second turn; {len(short)} requests had less, or no result.")
    return 1 if short or agents < len(found) else 0
