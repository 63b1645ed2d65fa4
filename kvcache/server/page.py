"""The page of a server: what runs, and a chat, in one file without outside resources."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files

from starlette.responses import HTMLResponse

__all__ = ["page"]


def page() -> HTMLResponse:
    """The page. Its policy lets a browser run its own script alone, and ask this server alone."""
    text = files("kvcache.server").joinpath("page.html").read_text("utf-8")
    script, style = (_source(text, tag) for tag in ("script", "style"))
    policy = (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {"content-security-policy": policy, "cache-control": "no-cache", "referrer-policy": "no-referrer"}
    return HTMLResponse(text, headers=headers)


def _source(text: str, tag: str) -> str:
    """The content of a tag as policies name it: by its hash."""
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return f"'sha256-{b64encode(sha256(content.encode()).digest()).decode()}'"
