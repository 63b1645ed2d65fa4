from collections.abc import Iterable, Sequence

from kvcache.prefix.index import PrefixIndex
from kvcache.prefix.slots import Claim
from kvcache.prefix.source import PageReader

def commit(parts: Iterable[tuple[PrefixIndex, PrefixIndex, Sequence[Claim], Sequence[PageReader]]]) -> None: ...
