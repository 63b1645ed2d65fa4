"""Weights from a seeded stream: golden networks of `tests/golden/seeded` have them in place of a file of tensors.

`weights.json` of such a folder:

    seed       of the stream
    dtype      "F32", "F16" or "BF16": how the file stores floats; float32 for those in `exact`
    exact      names of tensors that stay float32
    tensors    for each name of the file its shape, the standard deviation and the mean: `[shape, deviation, mean]`
    digest     SHA-256 over the names and bytes of all tensors
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
from places import GOLDEN

SEEDED = sorted(path.parent.name for path in GOLDEN.glob("seeded/*/weights.json"))


def values(seed, name, shape, deviation, mean):
    """Float32 numbers of one tensor: uniform, from raw bits of a stream of its own, the same on every machine."""
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little")
    raw = np.random.PCG64(key).random_raw(max(1, math.prod(shape)))[: math.prod(shape)]
    unit = ((raw >> np.uint64(52)).astype(np.float64) - 2047.5) / 4096 * math.sqrt(12)
    return (mean + deviation * unit).astype(np.float32).reshape(shape)


def stored(array, dtype):
    """The same numbers as a file of this type has them: their bits, and the float32 that they stand for."""
    if dtype == "F32":
        return array, array
    if dtype == "F16":
        return (half := array.astype(np.float16)), half.astype(np.float32)
    bits = (array.view(np.uint32) >> 16).astype(np.uint16)  # the nearer to zero of two neighbours
    return bits, (bits.astype(np.uint32) << 16).view(np.float32)


def tensors_of(spec):
    """For each tensor of a `weights.json` its type, its bits and its float32 numbers."""
    found = {}
    for name, (shape, deviation, mean) in spec["tensors"].items():
        dtype = "F32" if name in spec["exact"] else spec["dtype"]
        found[name] = (dtype, *stored(values(spec["seed"], name, tuple(shape), deviation, mean), dtype))
    return found


def digest(tensors):
    """SHA-256 over the names and bytes of `tensors_of`."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode() + tensors[name][1].tobytes())
    return total.hexdigest()


def write(path, tensors):
    """Write a safetensors file."""
    header, data = {}, b""
    for name, (dtype, bits, _) in tensors.items():
        header[name] = {
            "dtype": dtype, "shape": list(bits.shape), "data_offsets": [len(data), len(data) + bits.nbytes]
        }
        data += bits.tobytes()
    raw = json.dumps(header).encode()
    Path(path).write_bytes(len(raw).to_bytes(8, "little") + raw + data)


@cache
def _place():
    """A folder that this process removes when it ends."""
    return tempfile.TemporaryDirectory(prefix="kvcache-golden-")


def golden_folder(name):
    """The folder of any golden network."""
    return seeded(name) if name in SEEDED else GOLDEN / name


@cache
def seeded(name):
    """The folder of a golden network of `SEEDED`, with its file of tensors; tests only read it."""
    folder = Path(_place().name) / name
    shutil.copytree(GOLDEN / "seeded" / name, folder)
    spec = json.loads((folder / "weights.json").read_text())
    tensors = tensors_of(spec)
    assert digest(tensors) == spec["digest"], f"{name}: the stream makes other weights here"
    write(folder / "model.safetensors", tensors)
    return folder
