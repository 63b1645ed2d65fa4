"""Eight threads at random on one cache: every row that is read is the row that was written under its id."""

import threading

import numpy as np

from kvcache import OutOfMemoryError, PagedKvCache, PrefixAwarePrefill, PrefixCache, get_num_threads, set_num_threads

THREADS, SIZE, DIM = 8, 4, 8


class Worker:
    """A thread with its own sequences and with texts that all workers share; `done` counts operations."""

    def __init__(self, number, paged, prefixes):
        self.rng, self.paged = np.random.default_rng(number), paged
        self.prefixes, self.prefill = prefixes, PrefixAwarePrefill(prefixes)
        self.ids, self.rows, self.done, self.stamp = range(10 * number, 10 * number + 10), {}, 0, 1000 * number

    def write(self, seq, start, count):
        self.stamp += 1
        values = np.full(count, self.stamp % 60000, np.float32)
        for layer in range(2):
            self.paged.write(layer, seq, *[np.broadcast_to(values[:, None, None], (count, 1, DIM)).copy()] * 2, start)
        self.rows[seq][start : start + count] = values

    def verify(self, seq):
        for side in self.paged.read(int(self.rng.integers(2)), seq):
            np.testing.assert_array_equal(side[:, 0], np.repeat(self.rows[seq][:, None], DIM, 1), str(seq))

    def step(self):
        """One operation, on an existing or a new sequence."""
        rng, paged = self.rng, self.paged
        seq = int(rng.choice(self.ids))
        self.done += 1
        if seq not in self.rows:
            count = int(rng.integers(0, 20))
            if rng.random() < 0.5 or not count:
                paged.allocate(seq, count)
                self.rows[seq] = np.zeros(count, np.float32)
                return
            # A text that other workers may have cached in part; each row identifies its token.
            text = np.cumsum(rng.integers(1, 3, count)).astype(np.uint32)
            with self.prefill.prepare(text)[0] as session:
                start = session.num_tokens
                paged.adopt(seq, session.shared_blocks, start)
                self.rows[seq] = text[:start].astype(np.float32)
                self.verify(seq)
                paged.append(seq, count - start)
                self.rows[seq] = text.astype(np.float32)
                rest = np.broadcast_to(self.rows[seq][start:, None, None], (count - start, 1, DIM)).copy()
                for layer in range(2):
                    paged.write(layer, seq, rest, rest, start)
                self.prefixes.adopt(text, paged.block_table([seq]).block_ids)
            return
        rows, kind = self.rows[seq], int(rng.integers(9))
        if kind == 0:
            paged.free(seq)
            del self.rows[seq]
        elif kind == 1:
            paged.append(seq, count := int(rng.integers(1, 6)))
            self.rows[seq] = np.append(rows, np.zeros(count, np.float32))
        elif kind == 2 and len(rows):
            start = int(rng.integers(len(rows)))
            self.write(seq, start, int(rng.integers(1, len(rows) - start + 1)))
        elif kind == 3:
            other = int(rng.choice(self.ids))
            if other not in self.rows:
                paged.fork(seq, other)
                self.rows[other] = rows.copy()
        elif kind == 4:
            kept = np.flatnonzero(rng.random(len(rows)) < 0.8)
            paged.keep_tokens(seq, kept)
            self.rows[seq] = rows[kept]
        elif kind == 5:
            paged.compact(seq)
        elif kind == 6 and len(rows):
            # With constant queries and rows the result is a weighted mean of values, so it lies between them.
            out = paged.attention(0, np.zeros((1, 2, DIM), np.float32), [seq])
            np.testing.assert_allclose(out, rows.mean(), rtol=1e-3, atol=1e-3)
        elif kind == 7 and rng.random() < 0.2:
            self.prefixes.evict(int(rng.integers(1, 8)))
        else:
            self.verify(seq)

    def run(self, count):
        while self.done < count:
            try:
                self.step()
            except OutOfMemoryError:
                self.prefixes.evict(4)
                for seq in [seq for seq in self.ids if seq in self.paged]:  # also of failed steps
                    self.paged.free(seq)
                self.rows.clear()
        for seq in self.rows:
            self.verify(seq)


def test_eight_threads_on_one_cache(long):
    before = get_num_threads()
    set_num_threads(2)
    paged = PagedKvCache(400, SIZE, 1, DIM, num_layers=2, dtype="f32")
    prefixes = PrefixCache.over(paged, 120)
    workers = [Worker(number, paged, prefixes) for number in range(THREADS)]
    failed, count = [], 22_000 if long else 500

    def work(worker):
        try:
            worker.run(count)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in workers]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        set_num_threads(before)
    if failed:
        raise failed[0]
    assert sum(worker.done for worker in workers) >= (170_000 if long else 4_000)
    prefixes.check()
    for worker in workers:
        for seq in worker.rows:
            paged.free(seq)
    prefixes.clear()
    assert paged.used_block_count == 0
