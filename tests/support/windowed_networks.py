"""Networks with windows for the tests of the engine, and what each layer may still have of a text."""

from dataclasses import replace

from places import GOLDEN
from recording_network import RecordingNetwork

from kvcache.engine import SamplingParams, Transformer
from kvcache.networks.protocols import LayerAttention

FULL = LayerAttention()
FOUR = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=4)
NONE = SamplingParams(max_tokens=0)


def window(size, **options):
    return LayerAttention(window=size, **options)


# By name: layers that keep all tokens beside one window or two; no layer that does; chunks, of whole blocks and others;
# layers of other sizes, also among those that keep all tokens; layers that read K and V of others.
KINDS = {
    "short": (window(5), FULL),
    "a block": (FULL, window(16), window(16)),
    "longer": (window(37), FULL, window(37)),
    "two windows": (window(20), FULL, window(70)),
    "windows alone": (window(20), window(50)),
    "one token": (FULL, window(1)),
    "chunks": (window(37, chunked=True), FULL, window(32, chunked=True)),
    "two sizes": (LayerAttention(num_kv_heads=1, head_dim=8), window(20), FULL, window(20, num_kv_heads=1)),
    "shared": (
        window(20), FULL, LayerAttention(num_kv_heads=1), window(20, kv_layer=0),
        LayerAttention(num_kv_heads=1, kv_layer=2), LayerAttention(kv_layer=1),
    ),
}


def network(kind):
    return RecordingNetwork(KINDS[kind])


class Windowed:
    """A network in which every layer but the first has a window, or chunks; of several sizes each layer has one."""

    def __init__(self, model, *sizes, chunked=False):
        self.model, self.config = model, model.config
        each = [window(size, chunked=chunked) for size in sizes]
        each = [FULL, *each] if len(sizes) == 1 else each
        self.attention = (*each, *[each[-1]] * (model.config.num_layers - len(each)))
        self.fingerprint = f"{sizes} tokens{', in chunks' * chunked}"

    def forward(self, tokens, positions, attend, logits, *, sink_positions=None, sink_rows=None, **places):
        places |= {"sink_positions": sink_positions, "sink_rows": sink_rows}
        return self.model.forward(tokens, positions, attend, logits, **places)


def windowed(name):
    """A golden network with windows; "chunks": one whose second layer has chunks."""
    model = Transformer.from_pretrained(GOLDEN / ("llama" if name == "chunks" else name))
    if name != "chunks":
        return model
    return Transformer(replace(model.config, windows=(None, 48), chunked=True), model.weights)
