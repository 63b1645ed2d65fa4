"""The process of the command `kvcache`: what ends it while it still imports is a line, and no traceback.

`main` catches what happens in a command. The package is imported before it, which takes a moment, reads variables of
the environment, and can be interrupted. So the first import of the package is this module, which sets how exceptions
end the process if it is the command; in other processes nothing changes.
"""

from __future__ import annotations

import os
import sys
from itertools import pairwise
from types import TracebackType

__all__: list[str] = []


def _is_command(name: str, arguments: list[str]) -> bool:
    if name != "-m":  # as it is while the package of a module is imported that is to run
        return name in ("kvcache", "kvcache.exe")
    return "-mkvcache" in arguments or ("-m", "kvcache") in pairwise(arguments)


def _print_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a user's error as one line, an interrupt not at all, and anything else as ever."""
    if issubclass(kind, KeyboardInterrupt):
        return
    if not issubclass(kind, (ImportError, OSError, ValueError)):
        sys.__excepthook__(kind, error, trace)
        return
    print(f"kvcache: {str(error).removeprefix('kvcache: ')}", file=sys.stderr)
    raise SystemExit(2)


if _is_command(os.path.basename(sys.argv[0]) if getattr(sys, "argv", None) else "", sys.orig_argv):
    sys.excepthook = _print_line
