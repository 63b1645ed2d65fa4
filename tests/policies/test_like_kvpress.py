"""Policies beside kvpress, on one network: the same tokens stay after a prompt, in every layer and KV head."""

import copy

import numpy as np
import pytest

from kvcache.engine import InferenceEngine
from kvcache.policies import TOVA, AdaKV, ExpectedAttention, KeyDiff, KVzip, SnapKV

kvpress = pytest.importorskip("kvpress", reason="pip install kvpress")
torch = pytest.importorskip("torch", reason="pip install torch")

pytestmark = pytest.mark.one_build

LENGTH, BUDGET = 150, 40
PRESSES = {
    "snapkv": (lambda: kvpress.SnapKVPress(0.5, 16, 5), lambda: SnapKV(16, 5, per_head=True)),
    "tova": (lambda: kvpress.TOVAPress(0.5), TOVA),
    "keydiff": (lambda: kvpress.KeyDiffPress(0.5), lambda: KeyDiff(per_head=True)),
    "expected": (lambda: kvpress.ExpectedAttentionPress(0.5), lambda: ExpectedAttention(4096, per_head=True)),
    "expected_mean": (
        lambda: kvpress.ExpectedAttentionPress(0.5, 64, 2, False, True, 0.02),
        lambda: ExpectedAttention(4096, future=64, sinks=2, covariance=False, epsilon=0.02, per_head=True),
    ),
    "expected_plain": (
        lambda: kvpress.ExpectedAttentionPress(0.5, use_vnorm=False),
        lambda: ExpectedAttention(4096, value_norms=False, per_head=True),
    ),
    "adakv_snapkv": (lambda: kvpress.AdaKVPress(kvpress.SnapKVPress(0.5, 8, 3)), lambda: AdaKV(SnapKV(8, 3))),
    "adakv_expected": (
        lambda: kvpress.AdaKVPress(kvpress.ExpectedAttentionPress(0.5), 0.4),
        lambda: AdaKV(ExpectedAttention(4096), 0.4),
    ),
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A folder with a network, tokens, of each layer the module and what a press gets, the network, and its cache."""
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=3, head_dim=16, max_position_embeddings=2048, tie_word_embeddings=False,
    )
    network = LlamaForCausalLM(config).eval()
    for name, weight in network.named_parameters():  # attention that is far from even
        if "q_proj" in name or "k_proj" in name:
            weight.data.normal_(0, 0.4)
    folder = tmp_path_factory.mktemp("network")
    network.save_pretrained(folder)
    calls = {}

    def watch(module, _, kwargs, output):
        module.rotary_emb = network.model.rotary_emb
        calls[module.layer_idx] = module, kwargs["hidden_states"], kwargs

    hooks = [layer.self_attn.register_forward_hook(watch, with_kwargs=True) for layer in network.model.layers]
    tokens, cache = np.random.default_rng(4).integers(0, 97, LENGTH), DynamicCache()
    with torch.no_grad():
        network(torch.tensor(tokens)[None], past_key_values=cache)
    for hook in hooks:
        hook.remove()
    for layer, (module, hidden, kwargs) in calls.items():
        keys, values = cache.layers[layer].keys, cache.layers[layer].values
        calls[layer] = module, hidden, keys, values, None, kwargs
    return folder, tokens, calls, network, cache


@pytest.mark.parametrize("name", PRESSES)
def test_the_same_tokens_stay(ran, name):
    folder, tokens, calls, _, _ = ran
    press, policy = (make() for make in PRESSES[name])
    press.compression_ratio = 1 - (BUDGET + 0.5) / LENGTH  # which is rounded down
    engine = InferenceEngine.from_pretrained(folder, eviction_policy=policy, kv_budget=BUDGET, activations="exact")
    engine.prefill_from_pos(tokens, 0)
    counts = []
    for layer, call in calls.items():
        with torch.no_grad():
            theirs = kept_by(press, *call)
        for head, want in enumerate(theirs):
            assert engine.kept_positions(layer, head).tolist() == want
            counts.append(len(want))
    assert sum(counts) == BUDGET * len(counts)
    assert (len(set(counts)) > 1) == name.startswith("adakv")


def kept_by(press, module, hidden, keys, values, attentions, kwargs):
    """The tokens of each KV head that a press keeps."""
    everything = set(range(keys.shape[2]))
    if isinstance(press, kvpress.AdaKVPress):
        press.compress(module, hidden, keys, values, attentions, kwargs)
        _, heads, tokens = (each.numpy() for each in module.masked_key_indices)
        return [sorted(everything - set(tokens[heads == head].tolist())) for head in range(keys.shape[1])]
    scores = press.score(module, hidden, keys, values, attentions, kwargs)[0]
    return [sorted(row.topk(BUDGET).indices.tolist()) for row in scores]


@pytest.mark.parametrize("layerwise", [False, True])
def test_kvzip_keeps_the_same_tokens(ran, layerwise):
    folder, tokens, calls, network, cache = ran
    words = {"\n\nRepeat the previous context exactly.": [5, 6, 7, 8], "\n": [3]}

    class Tokenizer:
        def encode(self, text, **options):
            return torch.tensor([words.get(text, [9, 10])])

    class Press(kvpress.KVzipPress):
        def forward_hook(self, module, args, kwargs, output):
            return super().forward_hook(module, args, kwargs | {"past_key_values": self._cache}, output)

    press = Press(1 - (BUDGET - 1e-4) / LENGTH, layerwise, chunk_size=64)
    press._context_ids, press._suffix_ids = torch.tensor(tokens)[None], torch.tensor([[3]])
    press._cache = copy.deepcopy(cache)
    for module, *_ in calls.values():
        module.masked_key_indices = None  # of another press
    with torch.no_grad():
        press._perform_kvzip_compression(network, Tokenizer())
    policy = KVzip(64, prompt=[5, 6, 7, 8], later=[9, 10], suffix=[3], layerwise=layerwise)
    engine = InferenceEngine.from_pretrained(folder, activations="exact")
    found = engine.compress(tokens, policy, ratio=(BUDGET + 0.5) / LENGTH)
    for layer, (module, *_) in calls.items():
        _, heads, evicted = (each.numpy() for each in module.masked_key_indices)
        for head in range(3):
            want = sorted({*range(LENGTH)} - {*evicted[heads == head].tolist()})
            assert found.positions(layer, head).tolist() == want
