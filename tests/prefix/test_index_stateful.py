"""`PrefixIndex` against dicts of whole prefixes: claims, lookups, evictions, two groups of layers, pages that wait."""

import gc

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcache.core.block_pool import BlockPool
from kvcache.prefix.index.prefix_index import PrefixIndex, load
from kvcache.prefix.index.slots import Slots
from kvcache.trie.policy import LFU
from kvcache.trie.trie import TokenTrie

SIZE = 2
NAMES = st.sampled_from([None, "a", ("a", 1)])
TEXT = st.lists(st.integers(0, 1), max_size=11).map(tuple)
PICK = st.integers(0, 9)


class IndexMachine(RuleBasedStateMachine):
    """A page is known by its namespace and the whole text that ends with it.

    Attributes:
        page_of, used, uses: its id, when it was used last, and how often.
        present: for each group, whether it has a slot.
        claims: claims with the pages that they refer to, and the text up to which they pin pages; None: a clear came.
        looked: pages that lookups hold, each with its text or None.
    """

    @initialize(pages=st.integers(1, 14), window=st.integers(0, 3), age=st.sampled_from([None, 0, 1, 3, 50]))
    def start(self, pages, window, age):
        self.window, self.age = window, age or 0
        self.pools = [BlockPool(pages), BlockPool(max(1, pages - 2))] if window else [BlockPool(pages)]
        self.slots = Slots(self.pools, SIZE, (0, window) if window else (0,))
        self.index = PrefixIndex(TokenTrie(SIZE, None if age is None else LFU(age)), self.slots, 8)
        self.page_of, self.used, self.uses, self.present = {}, {}, {}, {}
        self.claims, self.looked, self.clock, self.evicted = [], [], 0, 0

    # -- the twin

    def matched(self, name, tokens):
        """Full pages, as texts, that all groups can use."""
        texts, n = [], SIZE
        while n <= len(tokens) and (name, tokens[:n]) in self.page_of:
            texts.append((name, tokens[:n]))
            n += SIZE
        while self.window and texts and not all(self.present[text] for text in texts[-self.window :]):
            texts.pop()
        return texts

    def reasons(self, name, tokens, found, inside, evicted):
        """The reason why a lookup stopped behind `found` pages; the twin does not know whether the next was evicted."""
        text = tokens[: (found + 1) * SIZE]
        if 0 < len(tokens) < SIZE:
            return ["shorter_than_block"]
        if len(text) < (found + 1) * SIZE:
            return []
        if evicted or (name, text) in self.page_of:  # it is there, but not for all groups
            return ["evicted"]
        if any(text == other for _, other in self.page_of):
            return ["namespace"]
        return ["shorter_than_block" if inside else "no_shared_prefix"]

    def use(self, texts):
        self.clock += 1
        for text in texts:
            self.used[text] = self.clock
            self.uses[text] = self.uses.get(text, 0) + 1

    def rank(self, text):
        """The policy: lowest first."""
        return self.used[text] + self.age * self.uses[text]

    def pinned(self):
        return [text for *_, text in self.claims if text] + [text for _, text in self.looked if text]

    def needed(self, text):
        name, tokens = text
        longer = [other for where, other in [*self.page_of, *self.pinned()] if where == name]
        return text in self.pinned() or any(len(o) > len(tokens) and o[: len(tokens)] == tokens for o in longer)

    def leave(self, text):
        self.present.pop(text)
        self.used.pop(text)
        self.uses.pop(text)
        return self.page_of.pop(text)

    def references(self):
        held = list(self.page_of.values()) + [page for page, _ in self.looked]
        return held + [page for _, pages, _ in self.claims for page in pages]

    # -- calls

    @rule(name=NAMES, tokens=TEXT)
    def claim(self, name, tokens):
        texts, before, reasons = self.matched(name, tokens), self.index.hits, self.index.reasons
        claim = self.index.claim(tokens, name)
        missed = [key for key, count in self.index.reasons.items() if count != reasons[key]]
        assert missed == self.reasons(name, tokens, len(texts), claim.tail >= 0, "evicted" in missed)
        pages = claim.pages.tolist()
        assert pages[: claim.num_held] == [self.page_of[text] for text in texts]
        assert self.index.hits == before + len(texts)
        assert claim.num_held == len(texts)
        assert len(pages) - len(texts) == (claim.tail_tokens > 0) == (claim.tail >= 0)
        if claim.tail_tokens:
            part = tokens[: len(texts) * SIZE + claim.tail_tokens]
            ends = [text for text, page in self.page_of.items() if page == claim.tail]
            assert ends[0][0] == name
            assert ends[0][1][: len(part)] == part
        if texts:
            self.use(texts)
        self.claims.append((claim, pages, texts[-1] if texts else None))

    @precondition(lambda self: self.claims)
    @rule(choice=PICK, drop=st.booleans())
    def let_go(self, choice, drop):
        claim, *_ = self.claims.pop(choice % len(self.claims))
        if not drop:
            claim.release()
            claim.release()

    @precondition(lambda self: any(claim.num_held for claim, *_ in self.claims))
    @rule(choice=PICK)
    def hold_each(self, choice):
        some = [each for each in self.claims if each[0].num_held]
        claim, pages, last = some[choice % len(some)]
        if last is None:
            return  # it was claimed before a clear
        held = claim.num_held
        self.claims = [each for each in self.claims if each[0] is not claim]
        claim.hold_each()
        assert len(claim) == 0
        self.looked += [(pages[i], (last[0], last[1][: (i + 1) * SIZE])) for i in range(held)]

    @precondition(lambda self: self.looked)
    @rule(choice=PICK)
    def release(self, choice):
        page = self.looked[choice % len(self.looked)][0]
        last = max(i for i, (other, _) in enumerate(self.looked) if other == page)
        del self.looked[last]
        self.slots.release_each(np.array([page], np.int32))

    @rule(name=NAMES, tokens=TEXT, again=st.integers(0, 3))
    def insert(self, name, tokens, again):
        """Insert the text as far as there is room, behind its cached pages without the last `again` of them."""
        tokens = tokens[: len(tokens) // SIZE * SIZE]
        old = [(name, tokens[:n]) for n in range(SIZE, len(tokens) + 1, SIZE) if (name, tokens[:n]) in self.page_of]
        kept = max(0, len(old) - again)
        head = self.index.head(tokens[: kept * SIZE], name)
        assert (0 if head is None else len(head)) == kept
        if kept:
            self.use(old[:kept])
        self.slots.release_dropped()
        room = self.slots.room(len(tokens) // SIZE - kept)
        if room == 0:
            return
        fresh = self.slots.take(room)
        pages = fresh.pages.tolist()
        assert not set(pages) & set(self.references())
        end = (kept + room) * SIZE
        self.index.insert(tokens[:end], fresh, name, head)
        assert len(fresh) == len(old[kept : kept + room])
        for i, page in enumerate(pages):
            text, present = (name, tokens[: (kept + i + 1) * SIZE]), not self.window or i >= room - self.window
            self.page_of.setdefault(text, page)
            self.present[text] = present or self.present.get(text, False)  # a slot that it lacked is filled in
        self.use([(name, tokens[:n]) for n in range(SIZE, end + 1, SIZE)])

    @rule(count=st.integers(1, 4))
    def evict(self, count):
        evicted, free = self.index.evict(count), [text for text in self.page_of if not self.needed(text)]
        assert (evicted is None) == (not free)
        if evicted is None:
            return
        assert 1 <= len(evicted) <= count
        first = evicted.name, tuple(evicted.tokens.tolist())
        assert self.rank(first) == min(map(self.rank, free))
        for n in range(len(evicted)):
            text = first[0], first[1][: len(first[1]) - n * SIZE]
            assert not self.needed(text)
            assert self.leave(text) == evicted.pages[len(evicted) - 1 - n]
        self.claims.append((evicted, evicted.pages.tolist(), None))
        self.evicted += len(evicted)

    def own(self, name, tokens, after):
        """The pages that one text has alone, the first one at first: of a tree of pages, what hangs on no fork."""
        def below(text):
            return [page for page in self.page_of if page[0] == name and page[1][:-SIZE] == text]

        end = 0
        while (name, tokens[: end + SIZE]) in self.page_of and end + SIZE <= len(tokens):
            end += SIZE
        text = tokens[:end]
        if not text:
            return []
        while following := below(text):  # what alone continues it
            following = [page for page in following if page[1][: len(tokens)] == tokens]
            if len(following) != 1:
                return []
            text = following[0][1]
        found = []
        while text and len(text) - SIZE >= after and (not found or len(below(text)) == 1):
            found.insert(0, (name, text))
            text = text[:-SIZE]
        return found

    @rule(name=NAMES, tokens=TEXT, after=st.integers(0, 5))
    def demote(self, name, tokens, after):
        own, got = self.own(name, tokens, after), self.index.demote(tokens, name, after)
        assert (got is None) == (not own)
        if got is not None:
            assert (tuple(got[0].tolist()), got[1]) == (own[-1][1], len(own[0][1]) - SIZE)
            self.used |= dict.fromkeys(own, 0)
            self.uses |= dict.fromkeys(own, 0)

    @rule(name=NAMES, tokens=TEXT, after=st.integers(0, 5))
    def discard(self, name, tokens, after):
        own, got = self.own(name, tokens, after), self.index.discard(tokens, name, after)
        assert (got is None) == (not own)
        if got is None:
            return
        text, begin, claim = got
        assert (tuple(text.tolist()), begin) == (own[-1][1], len(own[0][1]) - SIZE)
        gone = []
        for page in reversed(own):
            if self.needed(page):
                break
            gone.insert(0, self.leave(page))
        assert claim.pages.tolist() == gone
        self.claims.append((claim, gone, None))

    @precondition(lambda self: len(self.page_of) > 4)
    @rule()
    def clear(self):
        self.index.clear()
        for texts in (self.page_of, self.used, self.uses, self.present):
            texts.clear()
        self.claims = [(claim, pages, None) for claim, pages, _ in self.claims]
        self.looked = [(page, None) for page, _ in self.looked]

    @precondition(lambda self: not self.page_of)
    @rule(name=NAMES, texts=st.lists(TEXT, max_size=3), dropped=st.booleans(), bad=st.none() | PICK)
    def load(self, name, texts, dropped, bad):
        """Load texts. The content of all pages arrives but for one, which is forgotten with what continues it."""
        self.slots.release_dropped()
        claim = self.slots.take(self.slots.room(6))
        free, page_of, order, named, source = claim.pages.tolist(), {}, [], [], object()
        for tokens in texts:
            parts = [(name, tokens[:n]) for n in range(SIZE, len(tokens) + 1, SIZE)]
            new = [text for text in parts if text not in page_of]
            if new and len(new) <= len(free):
                page_of |= {text: free.pop(0) for text in new}
                pages = np.array([page_of[text] for text in parts], np.int32)
                named.append((name, parts[-1][1], self.slots, pages, source))
                order.append(parts)
        claim.cut(len(page_of))
        if dropped or not page_of:
            return
        load([(self.index, named)])
        self.page_of = page_of
        self.present = {text: bool((self.slots.of(np.array([page])) >= 0).all()) for text, page in page_of.items()}
        for parts in order:
            self.use(parts)
        found = self.matched(*order[0][-1])
        damaged = found[bad % len(found)] if bad is not None and found else None
        pages = np.array(list(page_of.values()), np.int32)
        assert self.slots.records(pages)["waits"].all()
        self.slots.arrived(pages[pages != page_of.get(damaged)])
        if damaged is not None:
            found = self.index.find(order[0][-1][1], name).pages
            assert found[self.slots.records(found)["waits"] != 0].tolist() == [page_of[damaged]]
            self.index.forget(order[0][-1][1], name, page_of[damaged])
            for text in [text for text in page_of if text[1][: len(damaged[1])] == damaged[1]]:
                self.leave(text)
        assert self.slots.source is None

    # -- invariants

    @invariant()
    def same(self):
        if not hasattr(self, "index"):
            return
        gc.collect(0)
        self.index.check()
        held = np.bincount(self.references(), minlength=self.slots.pool.num_blocks)
        assert self.slots.pool.ref_counts().tolist() == held.tolist()
        assert len(self.index) == len(self.page_of)
        assert np.flatnonzero(self.slots.records()["named"]).tolist() == sorted(self.page_of.values())
        assert self.index.evictions == self.evicted

    def teardown(self):
        if hasattr(self, "index"):
            self.claims.clear()
            for page, _ in self.looked:
                self.slots.release_each(np.array([page], np.int32))
            self.index.clear()
            self.slots.release_dropped()
            assert all(pool.num_used == 0 for pool in self.pools), "a slot is lost"


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
