"""Which golden networks an engine runs."""

from places import GOLDEN

from kvcache.engine import ModelConfig

__all__ = ["SERVED"]


def _is_plain(name):
    """Whether all layers attend in the same way to all tokens, at the same angles."""
    config = ModelConfig.from_pretrained(GOLDEN / name)
    return not (any(config.windows) or config.attention_softcap or config.sinks or config.rope.kind == "longrope")


SERVED = sorted(path.parent.name for path in GOLDEN.glob("*/golden.npz") if _is_plain(path.parent.name))
