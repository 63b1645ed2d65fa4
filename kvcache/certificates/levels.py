"""`Level`: the cold answers of another SIMD level, which a process of its own computes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from kvcache.certificates.answer_digests import Record
from kvcache.certificates.certificate import Certificate
from kvcache.errors import KvCacheError

__all__ = ["Level"]

_GRACE = 30.0  # seconds that a process has to start and to compute its first prompt, beyond its own bound


class Level(NamedTuple):
    """A SIMD level of this CPU and this build.

    Attributes:
        name: of the level.
        arguments: of the command `kvcache` in its process, which names the network and its formats.
    """

    name: str
    arguments: Sequence[str]

    def records(self, prompts: int, seconds: float) -> Sequence[Record]:
        """The records of the first prompts, as many as there is time for.

        KvCacheError: the process failed.
        """
        if seconds <= 0:
            return ()
        with TemporaryDirectory(prefix="kvcache-verify-") as folder:
            file = Path(folder, "certificate.json")
            bounds = ["--way", "cold", "--prompts", str(prompts), "--seconds", f"{seconds:.3f}", "--json", str(file)]
            path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])
            environment = {**os.environ, "KVCACHE_SIMD": self.name, "PYTHONPATH": path}
            try:
                done = subprocess.run(
                    [sys.executable, "-m", "kvcache", *self.arguments, *bounds], env=environment, check=False,
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                    timeout=seconds + _GRACE,
                )
            except subprocess.TimeoutExpired:
                return ()
            if done.returncode:
                said = done.stderr.decode(errors="replace").strip().splitlines()
                raise KvCacheError(f"level {self.name}: expected a certificate, got {said[-1] if said else 'none'}")
            found = Certificate.read(file)
            if found.machine.get("level") != self.name:
                raise KvCacheError(f"level {self.name}: expected a certificate of it, got {found.machine.get('level')}")
            return found.records
