"""The guide's table of networks names what is read, and nothing else; absent keys mean the same as to transformers."""

import json
import re

import pytest
from places import GOLDEN, PROJECT

from kvcache.errors import CheckpointError
from kvcache.networks.config import ModelConfig
from kvcache.networks.families import FAMILIES
from kvcache.networks.gguf_architectures import ARCHITECTURES
from kvcache.networks.towers import TOWERS
from kvcache.networks.unread_families import UNREAD, parts_missing

pytestmark = pytest.mark.one_build
GUIDE = (PROJECT / "kvcache" / "guides" / "checkpoints.md").read_text()


def test_the_table_of_the_guide():
    table = GUIDE.partition("## Networks")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("|")][2:]
    classes = [name for row in rows for name in re.findall(r"`([^`]+)`", row[2])]
    letters = [name for row in rows for name in re.findall(r"`([^`]+)`", row[3])]
    assert set(classes) == {*FAMILIES, *TOWERS}
    assert set(letters) == set(ARCHITECTURES)


def test_the_networks_that_are_not_read():
    """Each is refused with the parts that are missing, whatever names it, and the guide has its row.

    None of them lacks the delta rule, which is here, by head and by channel.
    """
    table = GUIDE.partition("Not read, and refused")[2].partition("## ")[0]
    rows = re.findall(r"(?m)^\| ([^|`]+) \| [^|`]+ \|$", table)
    for network in UNREAD:
        assert network.name in rows
        assert not {*network.classes} & {*FAMILIES, *TOWERS}
        assert network.gguf not in ARCHITECTURES
        assert "delta" not in network.parts
        message = f"expected a network without {network.parts}, got "
        for name in network.classes:
            with pytest.raises(CheckpointError, match=re.escape(f"architectures: {message}'{name}'")):
                ModelConfig.from_dict({"architectures": [name], "text_config": {}})
        for name in network.model_types:
            with pytest.raises(CheckpointError, match=re.escape(f"model_type: {message}'{name}'")):
                ModelConfig.from_dict({"model_type": name})
        assert parts_missing(network.gguf) == (network.parts if network.gguf else "")
    assert parts_missing(["x"]) == parts_missing("LlamaForCausalLM") == ""


DEFAULTS = json.loads((GOLDEN / "defaults.json").read_text())
OF_OTHERS = {"minicpm", "bailing_moe_v2"}  # which transformers has not
# What has to be said: a guess would load matrices of another size, or none.
NEEDED = {
    "hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers",
    "vocab_size",
}
NEEDED_OF = {
    "granitemoehybrid": {"layer_types"}, "nemotron_h": {"layers_block_type"}, "glm4_moe": {"head_dim"},
    "dots1": {"n_routed_experts", "n_shared_experts", "num_experts_per_tok"},
    "bailing_hybrid": {"linear_head_dim"},  # transformers writes another number as `head_dim` than it reads there
}


def spelled():
    """The name of each family and text network, its keys, and a `config.json` of such keys."""
    for name, keys in DEFAULTS["families"].items():
        yield name, keys, dict
    for name, texts in DEFAULTS["towers"].items():
        for own, keys in texts.values():
            yield name, keys, lambda keys, own=own: own | {"text_config": keys}


def test_every_family_and_tower_has_its_defaults():
    assert {family.model_type for family in FAMILIES.values()} - OF_OTHERS == set(DEFAULTS["families"])
    assert {tower.model_type: set(tower.texts) - {"kimi_k2"} for tower in TOWERS.values()} == {
        name: set(texts) for name, texts in DEFAULTS["towers"].items()
    }


def test_absent_keys_have_the_defaults_of_transformers():
    """Every family and every text network in a tower without one key, and without all that may be left out.

    The end of a text is no default: which token it is, files say.
    """
    for name, keys, build in spelled():
        needed = NEEDED | NEEDED_OF.get(name, set()) | {"model_type", "eos_token_id"}
        expected = ModelConfig.from_dict(build(keys))
        for key in set(keys) - needed:
            assert ModelConfig.from_dict(build({k: v for k, v in keys.items() if k != key})) == expected, (name, key)
        assert ModelConfig.from_dict(build({k: v for k, v in keys.items() if k in needed})) == expected, name


def test_sizes_that_have_to_be_said():
    """A size is either the default of transformers, or missed by its name; that of an MLP only if a layer has one."""
    for name, keys, build in spelled():
        expected = ModelConfig.from_dict(build(keys))
        for key in NEEDED & set(keys):
            less = {k: v for k, v in keys.items() if k != key}
            if key == "intermediate_size" and expected.experts and "mlp" not in expected.mlps:
                continue
            try:
                assert ModelConfig.from_dict(build(less)) == expected, (name, key)
            except CheckpointError as error:
                assert re.match(rf"{key}: .*got nothing", str(error)), (name, key, error)
