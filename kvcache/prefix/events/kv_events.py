"""`KvEvents`: where block events go, and what they say beside the blocks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kvcache.support.arguments import as_count, as_instance, short
from kvcache.support.hosts import is_loopback

__all__ = ["KvEvents", "SaltOf"]

logger = logging.getLogger("kvcache")

# From the name of a namespace to a number below 2**64, by which its hashes differ from those of others, and its salt.
SaltOf = Callable[[Hashable], tuple[int, str | None]]
_MOST = 512  # characters of a topic or a medium


@dataclass(frozen=True)
class KvEvents:
    """The addresses of block events, and what routers expect in them.

    Events have the tokens of all prompts and answers: whoever can reach an address reads the texts of all users.

    Args:
        address: to listen on, as ZeroMQ writes it: `tcp://127.0.0.1:5557` or `ipc:///run/kvcache.events`. A port `*`
            takes a free one.
        replay: another such address, at which readers ask for what they have missed; None: they cannot.
        topic: the first frame of each message, which readers may select by.
        medium: where the blocks are, as routers name the memory that a request continues from.
        rank: the number of this engine among those of one server.
        unsalted: whether blocks of namespaces are told as those of none. vllm-router reads no batch that has salts.

    Raises:
        TypeError, ValueError: not an address; too long; negative.
    """

    address: str
    replay: str | None = None
    topic: str = ""
    medium: str = "GPU"
    rank: int = 0
    unsalted: bool = False

    def __post_init__(self) -> None:
        for name in ("address", "replay"):
            if (at := getattr(self, name)) is not None:
                _check_address(name, at)
        if self.address == self.replay and not self.address.endswith(":*"):
            raise ValueError(f"replay: expected another address than that of events, got {self.replay}")
        for name in ("topic", "medium"):
            if len(as_instance(getattr(self, name), str, name)) > _MOST:
                raise ValueError(f"{name}: expected at most {_MOST} characters, got {len(getattr(self, name))}")
        as_count(self.rank, "rank")
        as_instance(self.unsalted, bool, "unsalted")

    @classmethod
    def of(cls, value: Any) -> KvEvents:
        """`value`, or the settings of an address alone."""
        return value if isinstance(value, KvEvents) else cls(as_instance(value, str, "kv_events"))

    def warn_of_others(self) -> None:
        """Log a warning for each address that other machines may reach."""
        for at in (self.address, self.replay):
            if at is not None and at.startswith("tcp://") and not is_loopback(_host(at)):
                logger.warning("%s: other machines may read there which tokens are in the texts of all users", at)


def _host(address: str) -> str:
    return (urlsplit(address.replace("*", "0")).hostname or "") if "//*" not in address else "*"


def _check_address(name: str, at: Any) -> None:
    kind, mark, where = as_instance(at, str, name).partition("://")
    if not mark or kind not in ("tcp", "ipc", "inproc") or not where or (kind == "tcp" and ":" not in where):
        raise ValueError(f"{name}: expected an address such as tcp://127.0.0.1:5557, got {short(at)}")
