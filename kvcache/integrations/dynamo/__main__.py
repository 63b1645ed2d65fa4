"""The command `python -m kvcache.integrations.dynamo`."""

from __future__ import annotations

import sys

from kvcache.integrations.dynamo.dynamo_options import options_of


def main(arguments: list[str] | None = None) -> None:
    """Run a worker until SIGINT or SIGTERM."""
    options = options_of(arguments)
    try:
        from kvcache.integrations.dynamo.dynamo_worker import run
    except ImportError as error:
        needed = "a worker of Dynamo needs ai-dynamo 1.6.1, see kvcache.integrations.dynamo"
        raise ImportError(f"{needed} ({error})") from None
    run(options)


if __name__ == "__main__":
    try:
        main()
    except (ImportError, OSError, ValueError) as error:
        sys.exit(f"kvcache: {error}")
