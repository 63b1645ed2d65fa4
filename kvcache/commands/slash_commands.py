"""`SlashCommands`: what a person can do in a conversation besides asking."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from kvcache.commands.conversation import Conversation
from kvcache.support.arguments import short

__all__ = ["SlashCommands"]

_COMMAND = re.compile(r"/(\w*)(?:\s+(.*))?", re.DOTALL)
_HELP = '''\
/clear          forget the conversation and its memory, but for the system message
/undo           take back the last question and its answer
/system TEXT    set the system message; /system alone shows it, /system "" removes it
/save FILE      write the conversation to a file; asks before it overwrites one
/load FILE      continue the conversation of a file
/help           this list
/exit           end; Ctrl-D does too
Several lines are one message if they are pasted, or stand between """ and """.
A message that begins with a slash and one of these words needs a space before it.
Ctrl-C stops an answer; while the message is still read, nothing of it is kept.
The line after an answer has the tokens of the conversation, the speed, how many
tokens of the prompt were cached, the time to the first piece, and the memory of
keys and values.'''


class SlashCommands:
    """The commands of a conversation: `/help`, `/exit`, `/clear`, `/undo`, `/system`, `/save` and `/load`.

    Args:
        conversation: is changed.
        tell: called with each text that a command prints.
        confirm: asks the person a question; whether the answer is yes, which Enter alone is not if `default` is
            False.
    """

    def __init__(
        self, conversation: Conversation, tell: Callable[[str], None], confirm: Callable[..., bool]
    ) -> None:
        self._conversation, self._tell, self._confirm = conversation, tell, confirm
        self._commands: dict[str, Callable[[str], None]] = {
            "help": self._help, "clear": self._clear, "undo": self._undo, "system": self._system,
            "save": self._save, "load": self._load,
        }

    def match(self, message: str) -> re.Match[str] | None:
        """A message as a command: a slash and a word, which no other slash follows."""
        return _COMMAND.fullmatch(message.rstrip()) if message.startswith("/") else None

    def run(self, command: re.Match[str]) -> bool:
        """Run a command; False: it ends the conversation. What fails is told, and changes nothing."""
        name, rest = command[1], (command[2] or "").strip()
        if name == "exit":
            return False
        if name not in self._commands:
            self._tell(f"/{name}: expected a command, got none of that name; /help lists them")
            return True
        try:
            if rest and name in ("help", "clear", "undo"):
                raise ValueError(f"text: expected none behind the command, got {short(rest)}")
            self._commands[name](rest)
        except (OSError, ValueError) as error:
            self._tell(f"/{name}: {error}")
        return True

    def _help(self, rest: str) -> None:
        self._tell(_HELP)

    def _clear(self, rest: str) -> None:
        self._conversation.clear()
        self._tell(self._state("forgotten"))

    def _undo(self, rest: str) -> None:
        question = self._conversation.undo()
        if question is None:
            self._tell("/undo: expected a question to take back, got an empty conversation")
        else:
            line = " ".join(question.split())
            self._tell(self._state(f"taken back: {line if len(line) <= 60 else line[:57] + '...'}"))

    def _system(self, rest: str) -> None:
        if rest:
            self._conversation.set_system(None if rest == '""' else rest)
        text = self._conversation.system
        self._tell("no system message" if text is None else f"system: {text}")

    def _save(self, rest: str) -> None:
        path = Path(_file(rest)).expanduser()
        if path.is_file() and not self._confirm(f"{rest} exists. Overwrite it?", default=False):
            self._tell("not saved")
            return
        self._conversation.save(path)
        self._tell(f"saved: {len(self._conversation.messages)} messages")

    def _load(self, rest: str) -> None:
        self._conversation.load(_file(rest))
        self._tell(self._state(f"loaded: {len(self._conversation.messages)} messages"))

    def _state(self, done: str) -> str:
        return f"{done}; {self._conversation.used():,} of {self._conversation.context:,} tokens"


def _file(name: str) -> str:
    if not name:
        raise ValueError("file: expected its name behind the command, got none")
    return name
