"""Work in a process of its own, with a limit: what it gave before it failed, or took too long, is kept."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

from bench.support.report import reason_of

__all__ = ["values_told", "values_within"]


def _send(pipe: Connection, work: Callable[..., Iterable[Any]], arguments: tuple[Any, ...]) -> None:
    try:
        for value in work(*arguments):
            pipe.send((value,))
        pipe.send(None)
    except Exception as error:  # a package is absent, or does not read the network
        pipe.send(reason_of(error))


def values_within(seconds: float, work: Callable[..., Iterable[Any]], *arguments: Any) -> Iterator[Any]:
    """Yield what `work` yields in a new process, as soon as it does. RuntimeError: why there is no more."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(theirs, work, arguments))
    process.start()
    theirs.close()
    end = perf_counter() + seconds
    try:
        while (found := ours.recv() if ours.poll(max(0.0, end - perf_counter())) else "") is not None:
            if isinstance(found, str):
                raise RuntimeError(found or f"it took more than {seconds:g} s")
            yield found[0]
    except EOFError:
        process.join()
        raise RuntimeError(f"its process ended with status {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
        ours.close()


def values_told(
    name: str, reasons: dict[str, str], seconds: float, work: Callable[..., Iterable[Any]], *arguments: Any
) -> Iterator[Any]:
    """Yield as `values_within`. Why there is no more is printed, and put into `reasons` under `name`."""
    try:
        yield from values_within(seconds, work, *arguments)
    except RuntimeError as error:
        print(f"not measured: {name} ({error})", flush=True)
        reasons[name] = str(error)
