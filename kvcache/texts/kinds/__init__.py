"""The kinds of layers, by how they keep tokens: a file each, with the class of their groups and one row.

    whole       0 1 2 3 4 5 6 7 8 9      every token                             whole.py
    window      . . . . . . 6 7 8 9      the newest ones                         window.py
    evicting    0 . . 3 . . . 7 . 9      what a policy keeps, each layer its own evicting.py
    state                        10      numbers that all tokens made            state.py
"""

from kvcache.texts.kinds.base import LayerKind
from kvcache.texts.kinds.evicting import EVICTING
from kvcache.texts.kinds.state import STATE
from kvcache.texts.kinds.whole import WHOLE
from kvcache.texts.kinds.window import WINDOW

__all__ = ["KINDS"]

# Each takes its layers of those that the ones before it have left. Pools and files have their groups from the last on.
KINDS: list[LayerKind] = [EVICTING, STATE, WINDOW, WHOLE]
