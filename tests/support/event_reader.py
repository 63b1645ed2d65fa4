"""A reader of block events, as a router has one: a mirror of the blocks of one worker, by numbers and replays."""

import time

import msgspec
import zmq

LAST = (-1).to_bytes(8, "big", signed=True)


class Mirror:
    """The blocks that batches have told of.

    Attributes:
        blocks: by hash: the hash of the block before it or None, its tokens, its extra key.
        number: of the last batch.
        gaps: how often batches were missing.
        events: the kinds of all events so far.
    """

    def __init__(self):
        self.blocks, self.number, self.gaps, self.events = {}, -1, 0, []

    def read(self, number, batch, replay):
        """Take a batch; `replay(start)` gives those from a number on, which may begin with a later one: a snapshot."""
        if number > self.number + 1:
            self.gaps += 1
            for old, data in replay(self.number + 1):
                self.take(old, data)
        self.take(number, batch)

    def take(self, number, batch):
        if number <= self.number:
            return
        seconds, events, rank = msgspec.msgpack.decode(batch)
        assert seconds > 0
        assert rank == 0
        if number > self.number + 1:
            assert events[0] == {"type": "AllBlocksCleared"}, "a gap that nothing fills"
        salted = {"extra_keys" in event for event in events if event["type"] == "BlockStored"}
        assert len(salted) < 2, "namespaces with a salt beside others"
        for event in events:
            self.apply(event)
        self.number = number

    def apply(self, event):
        self.events.append(event["type"])
        if event["type"] == "AllBlocksCleared":
            assert event == {"type": "AllBlocksCleared"}
            self.blocks.clear()
        elif event["type"] == "BlockRemoved":
            assert set(event) == {"type", "block_hashes", "medium"}
            for each in event["block_hashes"]:
                del self.blocks[each]
        else:
            self.store(**event)

    def store(self, type, block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name,
              extra_keys=None, cache_salt=None):
        assert (type, lora_id, medium, lora_name) == ("BlockStored", None, "GPU", None)
        assert len(token_ids) == len(block_hashes) * block_size
        assert extra_keys is None or len(extra_keys) == len(block_hashes)
        parent = parent_block_hash
        assert parent is None or parent in self.blocks, "a block before the one that it continues"
        assert cache_salt == self.salt_of(parent) if parent is not None else extra_keys == (
            cache_salt and [[cache_salt]] + [None] * (len(block_hashes) - 1)
        )
        for i, each in enumerate(block_hashes):
            assert 0 <= each < 2**63
            assert each not in self.blocks
            key = None if extra_keys is None else extra_keys[i]
            assert (key is None) or parent is None
            self.blocks[each] = parent, tuple(token_ids[i * block_size : (i + 1) * block_size]), key
            parent = each

    def salt_of(self, block):
        """The salt of the text of a block."""
        while block is not None:
            block, _, key = self.blocks[block]
        return key and key[0]

    def texts(self):
        """All texts that end with a block, each as `(salt, tokens)`: a list, since two namespaces may have one salt."""
        found = []
        for each in self.blocks:
            tokens, salt = (), None
            while each is not None:
                each, own, key = self.blocks[each]
                tokens, salt = own + tokens, key or salt
            found.append((salt and salt[0], tokens))
        return sorted(found, key=repr)


def cached_texts(cache, salt_of=lambda name: name):
    """All texts that end with a full block of a `PrefixCache`, as `Mirror.texts` has them, by salts of namespaces."""
    index, size, found = cache._index, cache.block_size, {}
    names = {space.root: salt_of(space.name) for space in index.namespaces()}
    for root, tokens, values in [index.trie.path(leaf) for leaf in index.trie.leaf_ids()]:
        pages = {page: (names[root], tuple(tokens[: n * size].tolist())) for n, page in enumerate(values.tolist(), 1)}
        found.update((page, text) for page, text in pages.items() if text[1][-1] != 2**32 - 1)
    return sorted(found.values(), key=repr)


class Reader:
    """A router that reads the events of one worker over its sockets, until the end of the `with` block."""

    def __init__(self, settings):
        self.mirror, self.settings = Mirror(), settings
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe(settings.topic.encode())
        self._socket.connect(settings.address)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._context.destroy(linger=0)

    def read(self, seconds=0.1):
        """Read what comes until nothing has come for so long."""
        while self._socket.poll(int(1000 * seconds)):
            topic, number, batch = self._socket.recv_multipart()
            assert topic == self.settings.topic.encode()
            self.mirror.read(int.from_bytes(number, "big"), batch, self.replay)

    def read_until(self, cache, salt_of=lambda name: name, seconds=20.0):
        """Read until the mirror has what the cache has."""
        end = time.monotonic() + seconds
        while self.mirror.texts() != cached_texts(cache, salt_of):
            assert time.monotonic() < end, "the mirror differs"
            self.read(0.05)
            for number, batch in self.replay(self.mirror.number + 1):  # those before it was connected
                self.mirror.take(number, batch)

    def replay(self, start):
        """Ask for the batches from a number on."""
        socket = self._context.socket(zmq.DEALER)
        socket.connect(self.settings.replay)
        socket.send_multipart([b"", start.to_bytes(8, "big")])
        found = []
        while socket.poll(20_000):
            empty, topic, number, batch = socket.recv_multipart()
            assert empty == b""
            if number == LAST:
                assert (topic, batch) == (b"", b"")
                socket.close(0)
                return found
            found.append((int.from_bytes(number, "big"), batch))
        raise AssertionError("no end of a replay")
