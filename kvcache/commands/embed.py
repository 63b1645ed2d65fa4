"""`embed`: the lines of a file as vectors, in an array of NumPy or in lines of JSON."""

from __future__ import annotations

import argparse
import json
import os
import stat
import sys
from pathlib import Path

import numpy as np

from kvcache.commands.options import MODEL, add_network, check_network, check_output, open_network, read_text
from kvcache.networks.protocols import Float32
from kvcache.serving import BatchEngine
from kvcache.serving.progress import shown

__all__ = ["add_embed", "embed"]


def add_embed(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("--model", required=True, metavar="PATH", help=MODEL)
    add("-f", "--file", default="-", metavar="FILE", help="texts in UTF-8, one a line; - is the standard input (-)")
    add("-o", "--output", default="-", metavar="FILE",
        help="FILE.npy is an array, one row a text; another file, or - for the standard output, lines of JSON (-)")
    add("--pooling", metavar="NAME", help="last or mean (as the checkpoint says)")
    add("--dimensions", type=int, metavar="N", help="the first numbers of each vector (as the checkpoint says)")
    add("--prompt-name", metavar="NAME", help="the checkpoint's prompt that stands before each text")
    add("--truncate", action="store_true", help="cut texts that are too long, rather than end with an error")
    add("--no-normalise", action="store_true", help="leave vectors as long as they are, rather than of length 1")
    add_network(parser)


def embed(options: argparse.Namespace) -> int:
    """Write the vectors of the lines; returns the exit status."""
    check_network(options)
    if options.output != "-":
        check_output(options.output, "output")
    elif sys.stdout is None:
        raise ValueError("output: expected a standard output, got a closed one")
    texts = _lines(options)
    with open_network(options, BatchEngine.from_pretrained) as engine, shown(True, len(texts)) as show:
        rows = engine.embed(
            texts, options.pooling, normalise=not options.no_normalise, dimensions=options.dimensions,
            prompt_name=options.prompt_name, truncate=options.truncate, progress=lambda done, _: show(done),
        )
    _write(options.output, rows)
    return 0


def _lines(options: argparse.Namespace) -> list[str]:
    """The lines of the file; the end of the last one begins no further one."""
    lines = read_text(options.file, "file").split("\n")
    return [line.removesuffix("\r") for line in (lines[:-1] if lines[-1] == "" else lines)]


def _write(output: str, rows: Float32) -> None:
    """Write all rows. If something fails, the old file stays. The new file has the permissions of the old one."""
    if output == "-":
        for row in rows:
            print(json.dumps(row.tolist()))
        sys.stdout.flush()
        return
    place = Path(output)
    if place.exists() and not place.is_file():  # a device, which is not to be replaced
        _write_to(place, output, rows)
        return
    place = Path(os.path.realpath(output))
    beside = place.with_name(f".{os.urandom(8).hex()}.part")  # however long the other name is
    try:
        beside.touch(exist_ok=False)
        if place.exists():
            beside.chmod(stat.S_IMODE(place.stat().st_mode))
        _write_to(beside, output, rows)
        beside.replace(place)
    finally:
        beside.unlink(missing_ok=True)


def _write_to(place: Path, output: str, rows: Float32) -> None:
    """Write to `place` the form that the name `output` asks for."""
    with place.open("wb") as file:
        if output.endswith(".npy"):
            np.save(file, rows)
        else:
            file.writelines(json.dumps(row.tolist()).encode() + b"\n" for row in rows)
