"""Names and addresses of this machine."""

from __future__ import annotations

from contextlib import suppress
from ipaddress import ip_address

__all__ = ["is_loopback"]


def is_loopback(host: str) -> bool:
    """Whether a name or an IP address, without a port or brackets, is localhost or a loopback address."""
    with suppress(ValueError):
        return host in ("localhost", "localhost.") or ip_address(host).is_loopback
    return False
