"""Naive versions of the token trie and the heap: dicts of whole prefixes and sorted lists.

Every operation scans the whole cache. A page is identified by the whole sequence that ends with it, so there are no
trees, nodes or sharing.
"""

from __future__ import annotations

Tokens = tuple[int, ...]


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Tokens before the first difference."""
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length


class NaiveHeap:
    """An indexed heap as a sorted list."""

    def __init__(self) -> None:
        self.keys: dict[int, float] = {}

    def order(self) -> list[tuple[int, float]]:
        return sorted(self.keys.items(), key=lambda item: (item[1], item[0]))


class NaiveTrie:
    """A naive `TokenTrie`: per namespace, page sequence -> [value, time of last use]."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.roots: dict[int, dict[Tokens, list[int]]] = {}
        self.pins: list[tuple[int, Tokens]] = []
        self.clock = 0

    def match(self, root: int, tokens: Tokens) -> int:
        return max((common_prefix(tokens, page) for page in self.roots[root]), default=0)

    def values(self, root: int, tokens: Tokens) -> list[int]:
        """The values of the full pages that `tokens` shares with the cache."""
        full = self.match(root, tokens) // self.page_size
        return [self.roots[root][tokens[: (i + 1) * self.page_size]][0] for i in range(full)]

    def donors(self, root: int, tokens: Tokens) -> set[int]:
        """The values of all pages that hold the last tokens of a match which ends inside a page."""
        length = self.match(root, tokens)
        if length % self.page_size == 0:
            return {-1}
        end = length - length % self.page_size + self.page_size
        pages = self.roots[root].items()
        return {value for page, (value, _) in pages if len(page) == end and page[:length] == tokens[:length]}

    def insert(self, root: int, tokens: Tokens, values: list[int]) -> int:
        existing = len(self.values(root, tokens))
        self.clock += 1
        for i, value in enumerate(values):
            page = self.roots[root].setdefault(tokens[: (i + 1) * self.page_size], [value, 0])
            page[1] = self.clock
        return existing

    def touch(self, root: int, tokens: Tokens) -> None:
        self.clock += 1
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            self.roots[root][tokens[:end]][1] = self.clock

    def evict(self, count: int) -> list[int]:
        freed: list[int] = []
        while len(freed) < count:
            free = [
                (page[1], root, key)
                for root, pages in self.roots.items()
                for key, page in pages.items()
                if not self.needed(root, key)
            ]
            if not free:
                break
            _, root, key = min(free)
            freed.append(self.roots[root].pop(key)[0])
        return freed

    def remove(self, root: int, tokens: Tokens) -> list[int]:
        freed = []
        while tokens in self.roots[root] and not self.needed(root, tokens):
            freed.append(self.roots[root].pop(tokens)[0])
            tokens = tokens[: -self.page_size]
        return freed

    def needed(self, root: int, page: Tokens) -> bool:
        """True if a longer cached sequence or a pin needs this page."""
        pages = self.roots[root]
        if any(len(other) > len(page) and other[: len(page)] == page for other in pages):
            return True
        for pin_root, pin in self.pins:
            if pin_root != root:
                continue
            if pin[: len(page)] == page:
                return True
            inside = len(page) - self.page_size < len(pin) < len(page) and page[: len(pin)] == pin
            if inside and sum(other[: len(pin)] == pin for other in pages) == 1:
                return True
        return False


class NaiveEntries:
    """A naive `EntryTrie`: per namespace, the entries; the cached tokens are those of the entries.

    `used` has the time of the last use of every prefix of an entry. The tokens of `kept` are not evicted.
    """

    def __init__(self) -> None:
        self.entries: dict[int, set[Tokens]] = {}
        self.used: dict[tuple[int, Tokens], int] = {}
        self.values: dict[tuple[int, Tokens], int] = {}
        self.kept: tuple[int, Tokens] = (-1, ())
        self.clock = 0

    def alive(self, root: int) -> set[Tokens]:
        keys = set(self.entries.get(root, ())) | ({self.kept[1]} if self.kept[0] == root else set())
        return {key[:n] for key in keys for n in range(1, len(key) + 1)}

    def match(self, root: int, tokens: Tokens) -> int:
        return max((common_prefix(tokens, prefix) for prefix in self.alive(root)), default=0)

    def stored_prefix(self, root: int, tokens: Tokens) -> int:
        return max((len(e) for e in self.entries.get(root, ()) if tokens[: len(e)] == e), default=0)

    def use(self, root: int, prefix: Tokens) -> None:
        self.clock += 1
        for n in range(1, len(prefix) + 1):
            self.used[root, prefix[:n]] = self.clock

    def serving(self, root: int, prefix: Tokens) -> Tokens:
        """The entry that serves a match: from its last token along the most recently used children, the first entry."""
        while prefix not in self.entries[root]:
            nexts = [p for p in self.alive(root) if len(p) == len(prefix) + 1 and p[:-1] == prefix]
            prefix = max(nexts, key=lambda p: self.used[root, p])
        return prefix

    def insert(self, root: int, tokens: Tokens, values: list[int]) -> int:
        existing = self.match(root, tokens)
        self.entries.setdefault(root, set()).add(tokens)
        for n in range(existing + 1, len(tokens) + 1):
            self.values[root, tokens[:n]] = values[n - 1]
        self.use(root, tokens)
        return existing

    def forget(self, root: int, entry: Tokens) -> list[int]:
        """Remove an entry; the values of the tokens that no other entry needs, last first."""
        self.entries[root].discard(entry)
        alive = self.alive(root)
        gone = [entry[:n] for n in range(len(entry), 0, -1) if entry[:n] not in alive]
        for prefix in gone:
            del self.used[root, prefix]
        return [self.values.pop((root, prefix)) for prefix in gone]

    def evict(self) -> list[int] | None:
        """The least recently used entry that nothing extends; after these, the longest one on the kept path."""
        leaves = []
        for root, entries in self.entries.items():
            longer = self.alive(root)
            for e in entries:
                kept = self.kept[0] == root and self.kept[1] == e
                if not kept and not any(len(o) > len(e) and o[: len(e)] == e for o in longer):
                    leaves.append((self.used[root, e], root, e))
        if leaves:
            _, root, entry = min(leaves)
            return self.forget(root, entry)
        on_path = self.stored_prefix(*self.kept)
        return self.forget(self.kept[0], self.kept[1][:on_path]) if on_path else None


class NaivePrefixKv:
    """A naive `PrefixKvCache` with room for `max_tokens` slots and `max_entries` entries."""

    def __init__(self, max_entries: int, max_tokens: int, min_prefix_len: int, partial: bool) -> None:
        self.trie = NaiveEntries()
        self.limits = max_entries, max_tokens
        self.min_prefix_len = max(1, min_prefix_len)
        self.partial = partial
        self.next_slot = 0
        self.held: list[set[int]] = []  # the slots of each state that a caller holds

    def slots(self, root: int, tokens: Tokens) -> list[int]:
        return [self.trie.values[root, tokens[:n]] for n in range(1, len(tokens) + 1)]

    def num_used(self) -> int:
        return len(set(self.trie.values.values()).union(*self.held))

    def num_entries(self) -> int:
        return sum(map(len, self.trie.entries.values()))

    def lookup(self, root: int, tokens: Tokens) -> int:
        """Tokens matched; 0 is a miss. The caller may put `slots` of the match into `held`."""
        length = self.trie.match(root, tokens) if self.partial else self.trie.stored_prefix(root, tokens)
        if length < self.min_prefix_len:
            return 0
        self.trie.use(root, self.trie.serving(root, tokens[:length]))
        return length

    def store(self, root: int, tokens: Tokens) -> bool:
        """Store an entry; returns False if it can never fit."""
        if len(tokens) < self.min_prefix_len:
            return True
        max_entries, max_tokens = self.limits
        length = self.trie.match(root, tokens)
        elsewhere = set().union(*self.held) - set(self.slots(root, tokens[:length]))
        if max_entries == 0 or len(elsewhere) + len(tokens) > max_tokens:
            return False
        self.trie.use(root, tokens[:length])
        self.trie.kept = root, tokens[:length]
        while True:
            new = tokens not in self.trie.entries.get(root, ())
            if self.num_entries() + new <= max_entries and self.num_used() + len(tokens) - length <= max_tokens:
                break
            self.trie.evict()
        self.trie.insert(root, tokens, list(range(self.next_slot, self.next_slot + len(tokens))))
        self.trie.kept = (-1, ())
        self.next_slot += len(tokens)
        return True

    def remove(self, root: int, tokens: Tokens) -> bool:
        stored = tokens in self.trie.entries.get(root, ())
        if stored:
            self.trie.forget(root, tokens)
        return stored
