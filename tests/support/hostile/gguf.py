"""Hostile GGUF files: each must be refused soon, in little memory.

    python -m hostile.gguf FOLDER

loads all of them in one process with a memory limit and prints their outcomes as JSON. `CASES` maps a name to a
function that makes the file: `(path, bytes of a valid file)`. `MUTANTS` more have one changed byte in the header.
"""

import json
import os
import random
import signal
import struct
import sys
from pathlib import Path

import gguf_files
from gguf_files import ARRAY, BOOL, F32, I32, STRING, U8, U32, U64, array, entry, pack, tensor
from hostile.checkpoints import SPECIAL
from hostile.limited_process import limit_memory
from places import GOLDEN

from kvcache.engine import InferenceEngine
from kvcache.gguf import file
from kvcache.networks.config_fields import gguf_keys
from kvcache.networks.families import FAMILIES
from kvcache.networks.gguf_config import NEUTRAL

LIMIT = file.MAX_HEADER_BYTES // 32  # of headers here: a header of the full size takes some seconds
ROOM = 1 << 28  # bytes that the process may allocate in addition
SECONDS = 300  # for one case; most take milliseconds, the slowest 2 s
MUTANTS = 300
CASES = {}

TOKENS = {
    "tokenizer__ggml__model": (STRING, "gpt2"),
    "tokenizer__ggml__pre": (STRING, "smollm"),
    "tokenizer__ggml__tokens": (ARRAY, ["a", "b", "ab", "<|im_end|>"], STRING),
    "tokenizer__ggml__token_type": (ARRAY, [1, 1, 1, 3], I32),
    "tokenizer__ggml__merges": (ARRAY, ["a b"], STRING),
    "tokenizer__ggml__eos_token_id": (U32, 3),
    "tokenizer__chat_template": (STRING, "{{ messages }}"),
}


def valid(path):
    """A file that loads; its header is about 3 kB."""
    return gguf_files.convert(GOLDEN / "llama", path, **TOKENS)


def case(name, content):
    """`content`: the bytes of a file, or a function `(path, valid bytes)` that writes it."""
    assert name not in CASES, name
    CASES[name] = content if callable(content) else lambda path, _: path.write_bytes(content)


def change(name, make):
    case(name, lambda path, content: path.write_bytes(make(content)))


def vocabulary(name, **changes):
    """The valid network with another vocabulary; None removes an entry."""
    entries = {key: content for key, content in (TOKENS | changes).items() if content is not None}
    case(f"vocabulary: {name}", lambda path, _: gguf_files.convert(GOLDEN / "llama", path, **entries))


def sparse(size, first=b""):
    def write(path, _):
        with open(path, "wb") as file:
            file.write(first)
            file.truncate(size)

    return write


for kind, make in SPECIAL.items():
    case(kind, lambda path, _, make=make: make(path))
for size in (0, 1, 3, 4, 8, 12, 16, 23, 24, 25, 32, 100, 500, 1000, 2000, -1, -100, -5000):
    change(f"cut at {size}", lambda content, size=size: content[:size])
for size in range(40, 2500, 60):
    change(f"cut at about {size}", lambda content, size=size: content[:size])
case("sparse, 1 TiB", sparse(2**40))
case("sparse, 1 TiB, with a header", sparse(2**40, b"GGUF" + struct.pack("<IQQ", 3, 0, 2**40)))
case("sparse, 1 TiB, an array to its end", sparse(2**40, pack([entry("a", ARRAY, array(U8, [], 2**39))])))
case("sparse, 1 TiB, texts to its end", sparse(2**40, pack([entry("a", ARRAY, array(STRING, [], 2**36))])))
case("sparse, 1 TiB, tensors to its end", sparse(2**40, pack(num_tensors=2**34)))
case("empty texts to the limit", sparse(2**40, pack([entry("a", ARRAY, array(STRING, [], LIMIT // 8 - 9))])))
for version in (0, 1, 4, 2**31, 3 << 24, 2 << 24):
    case(f"version {version}", pack(version=version))
for count in (1, 2**31, 2**32, 2**60, 2**63, 2**64 - 1):
    case(f"{count} entries", pack(num_entries=count))
    case(f"{count} tensors", pack(num_tensors=count))
    case(f"a key of {count} bytes", pack([struct.pack("<Q", count)]))
    case(f"a text of {count} bytes", pack([entry("a", STRING, struct.pack("<Q", count))]))
    for kind in range(14):
        case(f"an array of {count} values of kind {kind}", pack([entry("a", ARRAY, array(kind, [], count))]))
NEST = struct.pack("<IQ", ARRAY, 1)
case("nested arrays", pack([entry("a", ARRAY, NEST * 50_000)]))
case("short texts to the limit", lambda path, _: path.write_bytes(pack([entry("a", ARRAY, short_texts())])))
case("many keys", lambda path, _: path.write_bytes(many_keys()))
case("many tensors", lambda path, _: path.write_bytes(many_tensors()))
for key in ("llama.block_count", "llama.embedding_length", "llama.attention.head_count", "llama.context_length"):
    values = (U32, 0), (U32, 2**32 - 1), (U64, 2**64 - 1), (I32, -1), (F32, 1e30), (STRING, "2"), (BOOL, True)
    for kind, content in values:
        shown = f"{key} of {content!r}"
        more = {key.replace(".", "__"): (kind, content)}
        case(shown, lambda path, _, more=more: gguf_files.convert(GOLDEN / "llama", path, **more))
KEYS = [name for _, name in gguf_keys(FAMILIES["LlamaForCausalLM"])]
KEYS += [*NEUTRAL, "rope.dimension_count", "attention.value_length", "rope.scaling.type"]
KEYS = [f"llama.{key}" for key in [*dict.fromkeys(KEYS), "rope.scaling.factor", "rope.scale_linear"]]
KEYS += [key.replace("__", ".") for key in TOKENS if "tokens" not in key and "merges" not in key]
KEYS += [f"tokenizer.ggml.{key}" for key in ("bos_token_id", "unknown_token_id", "eot_token_id", "add_bos_token")]
for key in [*KEYS, "split.count"]:
    for content in ((ARRAY, [7, 8], U32), (ARRAY, ["a", "b"], STRING), (ARRAY, [0.5, 1.5], F32)):
        more = {key.replace(".", "__"): content}
        shown = f"{key} of {content[1]}"
        case(shown, lambda path, _, more=more: gguf_files.convert(GOLDEN / "llama", path, **TOKENS | more))
for name, key, content in (
    ("gemma2", "attention.head_count", (U32, 0)), ("gemma2", "attention.key_length", (STRING, "24")),
    ("gemma3", "attention.sliding_window", (F32, 24.0)), ("gemma3", "attention.sliding_window_pattern", (U32, 0)),
    ("gemma3", "attention.sliding_window_pattern", (STRING, "sssf")),
    ("gemma3", "attention.sliding_window_pattern", (ARRAY, [True, False], BOOL)),
    ("gemma3", "attention.sliding_window_pattern", (ARRAY, ["a"] * 4, STRING)),
    ("gemma3", "attention.sliding_window_pattern", (ARRAY, [1, 2, 0, 1], U32)),
    ("gpt_oss", "expert_count", (U32, 2**32 - 1)), ("gpt_oss", "expert_count", (U32, 4)),
    ("gpt_oss", "expert_count", (STRING, "5")), ("gpt_oss", "expert_used_count", (U32, 6)),
    ("gpt_oss", "expert_feed_forward_length", (U32, 31)), ("qwen3_moe", "expert_count", (U32, 0)),
    ("phi3_longrope", "rope.dimension_count", (U32, 0)), ("phi3_longrope", "rope.dimension_count", (U32, 8)),
    ("phi3_longrope", "rope.scaling.original_context_length", (U32, 0)),
    ("phi3_longrope", "rope.scaling.attn_factor", (F32, float("nan"))),
    ("granite", "residual_scale", (F32, float("inf"))), ("granite", "logit_scale", (STRING, "x")),
):
    letters = {"gpt_oss": "gpt-oss", "qwen3_moe": "qwen3moe", "phi3_longrope": "phi3"}.get(name, name)
    more = {f"{letters}.{key}".replace(".", "__"): content}
    case(
        f"{name}: {key} of {content!r:.60}",
        lambda path, _, name=name, more=more: gguf_files.convert(GOLDEN / name, path, **more),
    )
for key in ("general.architecture", "general.alignment"):
    case(f"an array as {key}", pack([entry(key, ARRAY, array(STRING, ["a", "b"]))]))
for key in ("llama.rope.freq_base", "llama.attention.layer_norm_rms_epsilon"):
    for content in (float("nan"), float("inf"), -1.0, 3e38):
        more = {key.replace(".", "__"): (F32, content)}
        case(f"{key} of {content}", lambda path, _, more=more: gguf_files.convert(GOLDEN / "llama", path, **more))


def short_texts():
    count = LIMIT // 10 - 10
    return array(STRING, [], count) + (struct.pack("<Q", 2) + b"ab") * count


def many_keys():
    return pack([entry(f"{i:x}", U8, 1) for i in range(2**14)])


def many_tensors():
    return pack([], [tensor(f"{i:x}", [1], 0, 32 * i) for i in range(2**14)], bytes(2**19))


def terabyte(path, _):
    """A sparse file with all tensors of a network of a terabyte."""
    sizes = {"block_count": 1, "context_length": 64, "embedding_length": 2**18, "feed_forward_length": 2**16}
    sizes |= {"attention.head_count": 2**12, "rope.dimension_count": 64}
    entries = [entry("general.architecture", STRING, "llama")]
    entries += [entry(f"llama.{key}", U32, content) for key, content in sizes.items()]
    entries += [entry("llama.attention.layer_norm_rms_epsilon", F32, 1e-5)]
    wide, narrow, offset, tensors = 2**18, 2**16, 0, []
    for name, shape in {
        "token_embd": [wide, 256], "output_norm": [wide], "blk.0.attn_norm": [wide], "blk.0.ffn_norm": [wide],
        "blk.0.attn_q": [wide, wide], "blk.0.attn_k": [wide, wide], "blk.0.attn_v": [wide, wide],
        "blk.0.attn_output": [wide, wide], "blk.0.ffn_gate": [wide, narrow], "blk.0.ffn_up": [wide, narrow],
        "blk.0.ffn_down": [narrow, wide],
    }.items():
        tensors.append(tensor(f"{name}.weight", shape, 0, offset))
        offset += 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
    content = pack(entries, tensors, b"\0")
    sparse(len(content) + offset, content)(path, None)


case("a sparse network of a terabyte", terabyte)
LETTERS = [f"{i:x}" for i in range(256)]
vocabulary("more tokens than rows", tokenizer__ggml__tokens=(ARRAY, [str(i) for i in range(257)], STRING))
vocabulary("a token twice", tokenizer__ggml__tokens=(ARRAY, ["a", "b", "a", "ab"], STRING))
vocabulary("no merges", tokenizer__ggml__merges=None)
vocabulary("a merge of one", tokenizer__ggml__merges=(ARRAY, ["ab"], STRING))
vocabulary("a merge of none", tokenizer__ggml__merges=(ARRAY, [""], STRING))
vocabulary("a merge of unknown tokens", tokenizer__ggml__merges=(ARRAY, ["x y"], STRING))
vocabulary("merges of numbers", tokenizer__ggml__merges=(ARRAY, [1], I32))
vocabulary("tokens of numbers", tokenizer__ggml__tokens=(ARRAY, [1, 2], I32))
vocabulary("tokens are a text", tokenizer__ggml__tokens=(STRING, "ab"))
vocabulary("no tokens", tokenizer__ggml__tokens=None)
vocabulary("kinds of another length", tokenizer__ggml__token_type=(ARRAY, [1], I32))
vocabulary("kinds of floats", tokenizer__ggml__token_type=(ARRAY, [1.0] * 4, F32))
vocabulary("unknown kinds", tokenizer__ggml__token_type=(ARRAY, [1, 1, 1, 99], I32))
vocabulary("end of text outside", tokenizer__ggml__eos_token_id=(U32, 4))
vocabulary("end of text a text", tokenizer__ggml__eos_token_id=(STRING, "3"))
vocabulary("another model", tokenizer__ggml__model=(STRING, "bert"))
vocabulary("another pre-tokenizer", tokenizer__ggml__pre=(STRING, "no-such"))
vocabulary("tokens that are no Unicode", tokenizer__ggml__tokens=(ARRAY, [b"\xff", "b", "ab", "c"], STRING))
vocabulary("a template that is no Unicode", tokenizer__chat_template=(STRING, b"\xff"))
vocabulary("model of a number", tokenizer__ggml__model=(U32, 1))
vocabulary("bos is a text", tokenizer__ggml__add_bos_token=(STRING, "yes"))
vocabulary("template of a number", tokenizer__chat_template=(U32, 1))
SPM = {"tokenizer__ggml__model": (STRING, "llama"), "tokenizer__ggml__merges": None}
vocabulary("scores of another length", **SPM, tokenizer__ggml__scores=(ARRAY, [0.0], F32))
vocabulary("scores that are none", **SPM, tokenizer__ggml__scores=(ARRAY, [float("nan")] * 4, F32))
LONG = ["a" * 513, "b", "ab", "c"]
vocabulary("a long token", **SPM, tokenizer__ggml__tokens=(ARRAY, LONG, STRING))


def outcome(make, path, content):
    """`(error, message)`: the class that ended it."""
    make(path, content)
    signal.alarm(SECONDS)
    try:
        engine = InferenceEngine.from_pretrained(path, num_blocks=1)
        _ = engine.tokenizer, engine.chat_template
        found = "nothing", ""
    except Exception as error:
        found = type(error).__name__, str(error)
    finally:
        signal.alarm(0)
    if path.is_dir() and not path.is_symlink():
        os.rmdir(path)
    else:
        path.unlink(missing_ok=True)
    path.with_suffix(".pipe").unlink(missing_ok=True)
    return found


def mutant(content, rng):
    """The file with one other byte in its first 3000."""
    changed = bytearray(content)
    changed[rng.randrange(3000)] = rng.choice((0, 1, 2, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    return bytes(changed)


def main(folder):
    file.MAX_HEADER_BYTES = LIMIT
    content = valid(folder / "valid.gguf").read_bytes()
    path = folder / "x.gguf"
    assert outcome(lambda path, content: path.write_bytes(content), path, content)[0] == "nothing"
    limit_memory(ROOM)
    found = {name: outcome(make, path, content) for name, make in CASES.items()}
    rng = random.Random(3)
    for i in range(MUTANTS):
        changed = mutant(content, rng)
        found[f"mutant {i}"] = outcome(lambda path, _, changed=changed: path.write_bytes(changed), path, content)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
