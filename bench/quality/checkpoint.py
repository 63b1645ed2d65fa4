"""`python -m bench quality --model PATH`: K and V of any checkpoint in every format, with and without a calibration.

Windows of three kinds of text: documentation and code that every Python has, and chats of the network itself (licences,
where it has no template for chats); `--texts` chooses others. Every run is compared with the f32 cache window by
window; a standard error is that of the mean over windows. Weights stay as they are stored, and meet activations
exactly: rounded activations would add a KL divergence of 0.004 of their own. llama.cpp's formats are measured beside
them on GGUF files, where llama-cpp-python is installed. Ctrl-C stops at any time and prints what is there; `--keep`
goes on from there.

Rows of *a window of a fifth* evict: they keep a fifth of the text, its newest tokens and four sinks, after pieces of
an eighth of it. They are compared with the same over f32.

`--format module:Class` adds two rows for a `kvcache.engine.Format`, with a residual of 64 tokens and without; of two of
them with a slash between, the first is for keys. Bits are those that it says. `--policy module:Class` adds rows for a
`kvcache.engine.Policy` over f32, which attends to an eighth of a window, at most 256 tokens, and to what it
has kept of those before; `--budgets` says how much it keeps. `--sparse N` adds rows with N
tokens that each query chooses.

Rows *as latents* run if `--rows` names them: V and K of all KV heads of a token are one latent row (`AsLatents`).
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.engine.smollm2 import find_file
from bench.quality import llamacpp
from bench.quality.divergence import Divergence
from bench.quality.kept import Windows
from bench.quality.latents import AsLatents, fits, like_factors
from bench.quality.network import Recorder
from bench.quality.parts import verdict
from bench.quality.rivals import HF, Kivi, hf_missing, hf_rows, hf_runs, is_plain
from bench.quality.texts import kinds_of, windows
from kvcache import Calibration, EvictionPolicy, InferenceEngine
from kvcache.calibration.calibrating import text_or_calibration
from kvcache.calibration.residual import num_firsts
from kvcache.core.rowformat import is_format, name_of
from kvcache.engine import Transformer
from kvcache.kernels.kernels import FORMATS, get_num_threads
from kvcache.networks.gguf import is_gguf
from kvcache.texts.policy import as_budgets, is_policy

__all__ = ["HEADER", "RUNS", "Biased", "absent", "load_own", "measure", "own_runs", "place_of", "rows", "verdicts"]

Tokens = npt.NDArray[np.uint32]

CALIBRATED, BIASED, BARE = ", calibrated", ", biased keys", ", no residual"
LATENT, CENTRED = ", as latents", ", centred"
OF_16, OF_128 = ", residual of 16", ", residual of 128"
# The format of keys; behind a slash that of values, where it is another one.
NAMES = (
    "q8", "q6", "q8/q4", "q4/q8", "q6/q5", "q6/q4", "q4/q6", "q5", "q5/q4", "q4/q5", "q4", "q8/q2", "q4/q2", "q2/q4",
    "q3", "q2",
)
MIXES = ("auto:5.0", "auto:3.5", "auto:3.0")  # formats of each layer
RUNS = (
    "f16", *NAMES, "q4" + BARE, *(name + CALIBRATED for name in NAMES), "q4" + BARE + CALIBRATED,
    "q4" + OF_16 + CALIBRATED, "q4" + OF_128 + CALIBRATED, *(name + CALIBRATED for name in MIXES), "q8" + BIASED,
    "q4" + BIASED, "q8" + CALIBRATED + BIASED, "q4" + CALIBRATED + BIASED,
)
LATENTS = tuple(
    name + more + LATENT
    for more in ("", CENTRED, CALIBRATED)
    for name in (*(name for name in NAMES if "/" not in name), "q4" + BARE)
)
WINDOW = ", window of a fifth"  # what is left of a text that evicts; compared with the same window over f32
EVICTING = (
    "f32" + WINDOW, "q8" + WINDOW, "q4" + WINDOW, "q8" + WINDOW + CALIBRATED, "q4" + WINDOW + CALIBRATED,
    "q4" + WINDOW + OF_16, "q8" + WINDOW + OF_16 + CALIBRATED, "q4" + WINDOW + OF_16 + CALIBRATED,
)
KIVI = {"KIVI's recipe, 4 bits": 4, "KIVI's recipe, 2 bits": 2}
QUICK = ("q8", "q4", "q2", "q8" + CALIBRATED, "q4" + CALIBRATED, "q2" + CALIBRATED)
HEADER = ["K/V format", "bits/value", "perplexity over f32", "KL, mean", "p99", "p99.9", "same token"]

# For SmolLM2-135M in windows of 2,048 tokens: run -> (rise of the perplexity, KL divergence).
GOALS = {
    "q8" + CALIBRATED: (0.0002, 3e-5), "q4" + CALIBRATED: (0.006, 0.0035), "q3" + CALIBRATED: (0.032, 0.022),
    "q2" + CALIBRATED: (0.09, 0.075), "q4" + BARE + CALIBRATED: (0.02, 0.015),
    "q4" + OF_16 + CALIBRATED: (0.02, 0.015),
    "auto:5.0" + CALIBRATED: (0.0025, 0.0025), "auto:3.5" + CALIBRATED: (0.025, 0.02),
    "auto:3.0" + CALIBRATED: (0.03, 0.032),
}
TIMES = {"q8": 1.2, "q4": 1.5}  # the KL divergence with biased keys over that without
RESIDUAL = 64  # tokens per group beside a format written in Python
SHARES = (0.1, 0.2, 0.4)  # of a window that a policy written in Python keeps
NORM, EVERY = 200.0, 3  # of the constant; it is in every third of the first nine layers


class Biased(Recorder):
    """A network whose keys have a constant of norm 200 in their slowest pair of channels, in three layers.

    Softmax cannot tell: the results of the f32 cache are those of the network. Real networks have such constants, from
    the biases of their key projections.
    """

    def forward(self, tokens: Any, positions: Any, attend: Any, logits: Any, **places: Any) -> Any:
        dim = self.config.head_dim
        constant = np.zeros(dim, np.float32)
        constant[[dim // 2 - 1, dim - 1]] = NORM / np.sqrt(2)
        layers = range(0, min(3 * EVERY, self.config.num_layers), EVERY)

        def biased(layer: int, queries: Any, keys: Any, values: Any, *more: Any) -> Any:
            return attend(layer, queries, keys + constant if layer in layers else keys, values, *more)

        return super().forward(tokens, positions, biased, logits, **places)


def load_own(place: str, kind: str = "format") -> Any:
    """An instance of a "format" or a "policy" that a module of the search path, or of the working directory, defines.

    Raises:
        SystemExit: there is none.
    """
    is_one, methods = {"format": (is_format, "`encode` and `decode`"), "policy": (is_policy, "`keep`")}[kind]
    module, _, name = place.partition(":")
    sys.path.insert(0, "")
    try:
        own = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise SystemExit(f"--{kind}: expected MODULE:CLASS, got {place}: {error}") from error
    finally:
        sys.path.remove("")
    if not is_one(own):
        raise SystemExit(f"--{kind}: expected a class with {methods}, got {place}")
    return own


def own_runs(options: argparse.Namespace, context: int) -> dict[str, dict[str, Any]]:
    """The runs of formats and policies of the command line, and the options of their engines."""
    found: dict[str, dict[str, Any]] = {}
    for count in options.sparse:
        for dtype in ("f32", "q4"):
            found[f"{dtype}, {count} chosen"] = {"dtype": dtype, "sparse_tokens": count}
    for place in options.format:
        pair = [load_own(each) for each in place.split("/")]
        name = "/".join(map(name_of, pair))
        for bare, length in (("", RESIDUAL), (BARE, 0)):
            found[name + bare] = {"key_dtype": pair[0], "value_dtype": pair[-1], "residual_length": length}
    for place in options.policy:
        for share in options.budgets or SHARES:
            policy = load_own(place, "policy")
            kept = {"eviction_policy": policy, "kv_budget": max(1, int(context * share)), "num_blocks": None}
            found[f"{name_of(policy)}, {100 * share:g} % kept"] = kept
    return found


def _options(name: str, calibration: Calibration | None, own: dict[str, dict[str, Any]]) -> dict[str, Any]:
    if name in own:
        return own[name]
    keys, _, values = name.partition(",")[0].partition("/")
    options: dict[str, Any] = {"dtype": keys} if keys in MIXES else {"key_dtype": keys, "value_dtype": values or keys}
    for words, length in ((BARE, 0), (OF_16, 16), (OF_128, 128)):
        if words in name:
            options["residual_length"] = length
    if CALIBRATED in name:
        options["calibrate"] = calibration
    if CENTRED in name and calibration is not None:
        options["calibrate"] = Calibration(calibration.centres)
    return options


class _Run:
    """The logits of one run, and what its K and V take per value."""

    def __init__(self, recorder: Recorder, context: int, options: dict[str, Any]) -> None:
        self._recorder = recorder
        piece = min(256, max(1, context // 8))  # what evicts does so after each: one as long as a window loses nothing
        self._engine = InferenceEngine(recorder, prefill_chunk=piece, **{"num_blocks": context // 16 + 1, **options})
        cache, config = self._engine.cache, self._engine.config
        length = self._engine.residual_length
        layers = 1 if cache.separate_layers else config.num_layers  # a block has one layer, or one head of it
        per_token = (1 if cache.latent else 2) * layers * cache.num_heads * config.head_dim
        packed = 8 * cache.block_memory_bytes / cache.block_size / per_token
        own = [each.bits for each in cache.formats.pair if each is not None]  # of both, or of none
        packed = sum(own) / len(own) if own else packed
        self.bits = packed
        if "kv_budget" in options:  # of what stays
            budgets = as_budgets(options["eviction_policy"], options["kv_budget"], config.num_layers)
            self.bits *= sum(min(budget, context) for budget in budgets) / len(budgets) / context
        if length or "kv_budget" not in options:
            unpacked = length + num_firsts("calibrate" in options, length)
            self.bits += FORMATS["f16"].bits * unpacked / context

    def __call__(self, tokens: Tokens) -> npt.NDArray[np.float32]:
        self._engine.score(tokens)
        return self._recorder.take()


def place_of(model: str) -> Path:
    """The checkpoint that `--model` names."""
    return find_file() if model == "smollm2" else Path(model)


def measure(
    options: argparse.Namespace, say: Callable[[str], None], tell: Callable[[dict[str, Any], int], None]
) -> tuple[dict[str, Any], str]:
    """All runs over all windows, or over those that were done at Ctrl-C; and what was measured, in words.

    Args:
        options: `model`, `calibrate`, `format`, `policy`, `rows`, `tokens`, `context`, `keep` and `quick` of the
            command line.
        say: takes the state, for a line that is overwritten.
        tell: takes the figures after the first window and whenever there are twice as many, and how many there are.
    """
    path = place_of(options.model)
    say(f"loading {path.name}")
    try:
        engine = InferenceEngine.from_pretrained(path, activations="exact", num_blocks=1)
    except FileNotFoundError as error:
        raise SystemExit(f"--model: {error}") from error
    if engine.tokenizer is None:
        raise SystemExit(f"--model: expected a checkpoint with a tokenizer, got {path}")
    context = min(options.context, engine.config.max_position_embeddings)
    own, kinds = own_runs(options, context), tuple(options.texts or kinds_of(engine))
    model, names = engine.model, (*(QUICK if options.quick else RUNS), *own, *(KIVI if is_plain(engine.model) else ()))
    every = (*names, *(EVICTING if is_plain(model) and not options.quick else ()))
    every = (*every, *(() if options.quick else _rival_names(path)))
    latents = LATENTS if options.rows and fits(model) else ()
    names, every = (*names, *latents), (*every, *latents)
    if unknown := set(options.rows or ()) - set(every):
        told = "".join(f"\n{line}" for line in absent(path))
        raise SystemExit(f"--rows: expected some of {'; '.join(every)}, got {'; '.join(sorted(unknown))}{told}")
    chosen = tuple(options.rows or every)
    names = tuple(name for name in names if name in chosen)
    known = text_or_calibration(options.calibrate, lambda: engine.tokenizer)
    total = options.tokens or (3 * context if options.quick else 40_960)
    say("calibrating")
    networks = _networks(engine, known, names, partial(windows, engine, context, context, kinds[:1]))
    runs: dict[str, Any] = {"f32": _Run(Recorder(model, np.copy), context, {})}
    for name in names:
        if name in KIVI:
            runs[name] = Kivi(model, KIVI[name], context)
            continue
        make, calibration = networks[next((kind for kind in (BIASED, LATENT) if kind in name), "")]
        runs[name] = _Run(make(), context, _options(name, calibration, own))
    with TemporaryDirectory() as folder:
        groups = [runs, *_evicting(model, networks[""][1], context, [name for name in every if name in chosen])]
        groups += [] if options.quick else _rivals(path, Path(folder), context, chosen)
        bits = {name: run.bits for group in groups for name, run in group.items()}
        found, count, kept = {name: Divergence() for name in bits}, 0, Windows(options.keep)
        try:
            for number, window in enumerate(windows(engine, context, total, kinds, options.keep)):
                done = f"{number * context:,} of {total:,} tokens"
                named = partial(_said, done, say)
                for name, one in kept.measure(window, groups, named).items():
                    if name in found:
                        for field, values in vars(one).items():
                            getattr(found[name], field).extend(values)
                count += 1
                if count & (count - 1) == 0 and count * context < total:
                    tell(_figures(found, bits), count)
        except KeyboardInterrupt:
            say(f"stopped after {count} windows")
        if not count:
            raise SystemExit("stopped before the first window was done")
    named = ", ".join(Path(kind).name for kind in kinds)
    text = f"{path.name}, {count} windows of {context:,} tokens of {named}"
    return _figures(found, bits), text


def _figures(found: dict[str, Divergence], bits: dict[str, float]) -> dict[str, Any]:
    return {name: one.figures() | {"bits": bits[name]} for name, one in found.items()}


def _networks(
    engine: InferenceEngine, known: Any, names: Sequence[str], texts: Callable[[], Iterator[Tokens]]
) -> dict[str, tuple[Callable[[], Recorder], Calibration | None]]:
    """The network as it is, "", and in the other forms that rows ask for: what makes it, and its calibration.

    Args:
        known: a text, or a calibration of the network as it is.
        texts: gives one that calibrates other forms in its place.
    """
    model, dtype = engine.model, MIXES[0] if any(name.startswith(MIXES) for name in names) else "q4"
    made: dict[str, tuple[Callable[[], Recorder], Any]] = {"": (partial(Recorder, model, np.copy), known)}
    ids = known
    if isinstance(known, Calibration) and any(kind in name for name in names for kind in (BIASED, LATENT)):
        ids = next(texts())
    if any(BIASED in name for name in names):
        made[BIASED] = partial(Biased, model, np.copy), ids
    if any(LATENT in name for name in names):
        made[LATENT] = partial(AsLatents, model, np.copy, like_factors(model, ids)), ids
    found = {}
    for kind, (make, calibrate) in made.items():
        network = make() if kind else model  # which has a name, so that its calibration is kept
        one = InferenceEngine(network, dtype="q4" if kind else dtype, calibrate=calibrate, num_blocks=1)
        found[kind] = make, one.cache.calibration
    return found


def _evicting(
    model: Transformer, calibration: Calibration | None, context: int, names: Sequence[str]
) -> list[dict[str, _Run]]:
    """Runs of `EVICTING` that `names` has, and the first one as their reference."""
    chosen = [name for name in EVICTING if name in names]
    budget = max(8, context // 5)
    kept = {"eviction_policy": EvictionPolicy.SlidingWindow(budget - 4, 4), "kv_budget": budget, "num_blocks": None}
    found = {
        name: _Run(Recorder(model, np.copy), context, _options(name, calibration, {}) | kept)
        for name in dict.fromkeys((EVICTING[0], *chosen))
    }
    return [found] if chosen else []


def _rival_names(path: Path) -> tuple[str, ...]:
    """The rows of other programs that are installed here."""
    llama = [f"llama.cpp {kv}" for kv in llamacpp.CACHES] if is_gguf(path) and llamacpp.installed() else []
    return (*llama, *hf_rows())


def absent(path: Path) -> list[str]:
    """A line for each other program that is not measured, which names what to install."""
    found = []
    if is_gguf(path) and not llamacpp.installed():
        found.append("not measured: llama.cpp (llama-cpp-python is not installed)")
    if missing := hf_missing():
        found.append(f"not measured: QuantizedCache of transformers (not installed: {', '.join(missing)})")
    return found


def _rivals(path: Path, folder: Path, context: int, chosen: Sequence[str]) -> list[dict[str, Any]]:
    """The chosen runs of llama.cpp and of transformers, each program's over its own full cache, the first one.

    llama.cpp's weights are float32, which meet activations exactly, as ours do.
    """
    found = []
    if llama := [name for name in _rival_names(path) if name in chosen and name not in HF]:
        llamacpp.quiet()
        link = folder / path.name
        link.symlink_to(path.resolve())
        plain = llamacpp.quantise(link, "F32", 1)
        kinds = {f"llama.cpp {kv}": kv for kv in llamacpp.CACHES}
        full = next(iter(kinds))
        found.append({name: _Rival(plain, context, kinds[name]) for name in dict.fromkeys([full, *llama])})
    if quantised := [name for name in hf_rows() if name in chosen]:
        found.append(hf_runs(path, context, quantised))
    return found


class _Rival:
    """The logits of llama.cpp; its context lives during a call alone, since its logits take 400 MB."""

    def __init__(self, path: Path, context: int, kv: str) -> None:
        self._make = partial(llamacpp.LlamaLogits, path, context, get_num_threads(), kv)
        self.bits = llamacpp.CACHES[kv][1]

    def __call__(self, tokens: Tokens) -> npt.NDArray[np.float32]:
        return self._make()(tokens)


def _said(done: str, say: Callable[[str], None], name: str, run: Any) -> Any:
    def call(tokens: Tokens) -> Any:
        say(f"{done}, {name}")
        return run(tokens)

    return call


def rows(figures: dict[str, Any]) -> list[list[str]]:
    """The rows of the table."""
    return [
        [
            name, f"{f['bits']:.2f}", f"{100 * f['rise']:+.3f} ± {100 * f['rise_se']:.3f} %",
            f"{f['kl']:.2g} ± {f['kl_se']:.1g}", f"{f['kl_p99']:.2g}", f"{f['kl_p999']:.2g}",
            f"{100 * f['same']:.2f} %",
        ]
        for name, f in figures.items()
    ]


def verdicts(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """The goals for SmolLM2, and what was measured."""
    found = []
    for name, (rise, kl) in GOALS.items():
        if name in figures:
            found += [verdict(name, figure, figures[name][figure], x) for figure, x in (("rise", rise), ("kl", kl))]
    for name, times in TIMES.items():
        biased = name + CALIBRATED + BIASED
        if biased in figures:
            found.append(verdict(biased, "kl", figures[biased]["kl"], times * figures[name + CALIBRATED]["kl"]))
    return found


def progress(text: str) -> None:
    """Overwrite the line of the state, if a person watches."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
