"""`Certificate`: the answers of a network on one machine, as JSON, and their comparison with another machine's."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvcache.certificates.answer_digests import Record, digest_of, first_difference
from kvcache.certificates.seeded_prompts import tokens_of
from kvcache.certificates.subject import Subject
from kvcache.kernels.kernels import BITS_VERSION, bf16_order, simd_level, simd_levels
from kvcache.kernels.threads import get_num_threads
from kvcache.networks.fingerprint import fingerprint
from kvcache.sampling.tokenizer_errors import decoded
from kvcache.support.arguments import short
from kvcache.support.json_text import json_fault

__all__ = ["IDENTITY", "Certificate", "Row", "identity_of", "machine_of"]

FORM = 1  # of the file, of prompts and of digests
_MOST_BYTES = 1 << 28
_TOKENS = 4096  # whose texts tell tokenizers apart
# What two certificates are to have in common before their digests are compared, in this order.
IDENTITY = {
    "form": "form", "bits": "bits, version", "network": "network", "tokenizer": "tokenizer", "weights": "weights",
    "activations": "activations", "kv": "K and V",
}


@dataclass(frozen=True, slots=True)
class Row:
    """A way, compared with the cold texts.

    Attributes:
        way: the name.
        prompts: how many were computed in this way and compared; 0: the way did not happen.
        tokens: their tokens, and the new ones.
        different: how many of these prompts differ.
        first: the first difference, in words; None: there is none.
        note: what happened to the last prompt, and why others were not computed in this way.
    """

    way: str
    prompts: int
    tokens: int
    different: int
    first: str | None
    note: str


@dataclass(frozen=True, slots=True)
class Certificate:
    """The answers of a network on one machine.

    Attributes:
        identity: the network and the meaning of its bits, by the names of `IDENTITY`.
        machine: the version of the library, the CPU, its levels and threads.
        records: the cold answers, one for each prompt.
        rows: the ways, each compared with the cold answers.
    """

    identity: dict[str, Any]
    machine: dict[str, Any]
    records: tuple[Record, ...]
    rows: tuple[Row, ...]

    @property
    def digest(self) -> str:
        """One digest of all records."""
        return digest_of([each.digest for each in self.records])

    @property
    def is_equal(self) -> bool:
        """Whether each way was compared with at least one prompt, and none differs."""
        return not self.different and not self.missing

    @property
    def different(self) -> list[str]:
        """The ways that differ."""
        return [row.way for row in self.rows if row.different]

    @property
    def missing(self) -> list[str]:
        """The ways in which no prompt was computed."""
        return [row.way for row in self.rows if not row.prompts]

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON. OSError: an error of the file system."""
        content = {
            **self.identity, **self.machine, "digest": self.digest, "equal": self.is_equal,
            "ways": [asdict(row) for row in self.rows], "prompts": [each.as_json() for each in self.records],
        }
        Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Certificate:
        """Read a certificate.

        Raises:
            OSError: no file that can be read.
            ValueError: it is none; a digest in it is not that of its parts.
        """
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ValueError(f"{path}: expected a certificate of at most {_MOST_BYTES} bytes, got more")
        try:
            content = json.loads(data)
            identity = {name: content.pop(name) for name in IDENTITY}
            prompts, rows, digest = content.pop("prompts"), content.pop("ways"), content.pop("digest")
            records = [_record(each) for each in prompts]
            content.pop("equal")
            if not records:
                raise ValueError("prompts: expected at least one, got none")
            found = cls(identity, content, tuple(records), tuple(Row(**row) for row in rows))
        except KeyError as error:
            raise ValueError(f"{path}: expected a certificate, got one without {short(error.args[0])}") from None
        except (AttributeError, TypeError):
            raise ValueError(f"{path}: expected a certificate, got one with parts of other types") from None
        except (RecursionError, ValueError) as error:
            raise ValueError(f"{path}: expected a certificate, got {json_fault(error)}") from None
        told = [each["digest"] for each in prompts]
        if told != [each.digest for each in records] or digest != found.digest:
            raise ValueError(f"{path}: expected the digests of its answers, got others")
        return found

    def expect(self, identity: dict[str, Any]) -> None:
        """ValueError: the certificate is of another network, format or version, so that its digests say nothing."""
        for name, words in IDENTITY.items():
            if self.identity[name] != identity[name]:
                expected, got = _text(identity[name]), _text(self.identity[name])
                raise ValueError(f"against: expected a certificate of {words} {expected}, got {got}")

    def differences(self, other: Certificate) -> Iterator[str]:
        """Compare the prompts that both certificates have; yields each difference, in words."""
        for number, (own, others) in enumerate(zip(self.records, other.records, strict=False)):
            found = first_difference(own, others)
            if found is not None or own.digest != others.digest:
                yield f"prompt {number}: {found or 'digests'}"


def _record(content: dict[str, Any]) -> Record:
    tokens, logprobs, steps = (tuple(content[name]) for name in ("tokens", "logprobs", "steps"))
    if not len(tokens) == len(logprobs) == len(steps) or not all(isinstance(each, float) for each in logprobs):
        raise ValueError(f"prompts: expected lists of one length, got {len(tokens)}, {len(logprobs)} and {len(steps)}")
    return Record(content["prompt"], tokens, logprobs, steps, content["scores"])


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items() if each is not None)
    return "none" if value is None else str(value)


def identity_of(subject: Subject) -> dict[str, Any]:
    """The network of a subject, and the meaning of its bits."""
    model, storage = subject.model, subject.storage
    formats = {getattr(array, "format", "f32") for array in model.weights.arrays()}
    order = f" in {bf16_order()}" if model.activations == "bf16" else ""
    calibration = storage["calibrate"]
    kv = {
        "keys": storage["key_dtype"], "values": storage["value_dtype"], "residual_length": storage["residual_length"],
        "calibration": calibration.fingerprint if calibration else None, "sparse_tokens": storage["sparse_tokens"],
    }
    kv = {name: list(each) if isinstance(each, tuple) else each for name, each in kv.items()}
    return {
        "form": FORM, "bits": BITS_VERSION, "network": fingerprint(model), "tokenizer": _tokenizer(subject),
        "weights": "+".join(sorted(formats)), "activations": f"{model.activations}{order}", "kv": kv,
    }


def _tokenizer(subject: Subject) -> str | None:
    """Digest the texts of some tokens, and the tokens of these texts; None: there is no tokenizer."""
    tokenizer = subject.tokenizer
    if tokenizer is None:
        return None
    digest = blake2b(digest_size=16)
    for token in tokens_of("tokenizer", _TOKENS, subject.model.config.vocab_size).tolist():
        text = decoded(tokenizer, [token], skip_special_tokens=False)
        digest.update(repr((text, tokenizer.encode(text, add_special_tokens=False).ids)).encode())
    return digest.hexdigest()


def machine_of(version: str) -> dict[str, Any]:
    """The version of the library, and this machine."""
    return {
        "kvcache": version, "cpu": _cpu(), "machine": platform.machine(), "level": simd_level(),
        "levels": list(simd_levels()), "threads": get_num_threads(),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if "model name" not in fields:
        return platform.processor() or platform.machine()
    return f"{fields['model name']} (family {fields.get('cpu family')}, model {fields.get('model')})"
