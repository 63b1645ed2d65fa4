"""The loop: requests come in, steps run, those that wait are told. One lock for all of it, and one for the inbox.

A submit takes the lock of the inbox alone, so that it does not wait for the step that runs. After an exception that
leaves a step, such as Ctrl-C, all works begin again behind what is cached of them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count

from kvcache.core.locks import CallLock, MendingLock
from kvcache.errors import InvalidOperationError, QueueFullError
from kvcache.grammar.mask_batch import MaskBatch
from kvcache.networks.protocols import Float32
from kvcache.serving.budget import pairs
from kvcache.serving.failures import as_failure
from kvcache.serving.request import Pending
from kvcache.serving.scheduler import PATIENCE, Scheduler
from kvcache.serving.stats import BatchStats, NamespaceStats
from kvcache.serving.thread import StepThread
from kvcache.serving.work import Work
from kvcache.support.arguments import short
from kvcache.texts.forward import Forward
from kvcache.texts.hints import Hint

__all__ = ["Steps"]

logger = logging.getLogger("kvcache")

_MOST_HINTS = 64  # that wait for the end of a step


class Steps:
    """Steps a scheduler.

    Args:
        scheduler: says what runs.
        forward: runs it.
        max_queue: the most works that wait.
        clock: seconds.

    Attributes:
        clock, forward: see above.
        lock: held by everything that changes a work.
        inbox_lock: held while works come in.
    """

    def __init__(self, scheduler: Scheduler, forward: Forward, max_queue: int, clock: Callable[[], float]) -> None:
        self._scheduler, self.forward, self._max_queue, self.clock = scheduler, forward, max_queue, clock
        self.lock = MendingLock(CallLock(level=2), self._mend)
        self.inbox_lock = CallLock(level=0)
        self._inbox: deque[Work] = deque()
        self._hints: deque[Hint] = deque()
        self._numbers = count()
        self._pending: dict[int, Pending] = {}  # of each work that has not ended
        self._woken: list[Pending] = []  # at the end of the step
        self._closed = False
        self._thread: StepThread | None = None
        self._submitted = 0  # works, under the lock of the inbox
        self._steps = self._finished = self._prefilled = self._new_tokens = self._cached_tokens = 0
        self._drafted = self._accepted = 0
        self._is_stale = False
        self._masks = MaskBatch()
        self._count()

    @property
    def running(self) -> Sequence[Work]:
        """Works that have a sequence."""
        return self._scheduler.running

    @property
    def num_running(self) -> int:
        """Works that have a sequence."""
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Works that have none."""
        return self._scheduler.num_waiting + len(self._inbox)

    # -- works come and go ----------------------------------------------------------------------------------

    def expect_open(self) -> None:
        """Raise InvalidOperationError after `close`."""
        if self._closed:
            raise InvalidOperationError("expected an engine that is open, got one after close")

    def expect_room(self, count: int) -> None:
        """Raise what `enqueue` of `count` works raises now."""
        self.expect_open()
        if count > self._max_queue:
            raise ValueError(f"n: expected at most {self._max_queue}, the requests that may wait, got {count}")
        if self.num_waiting + count > self._max_queue:
            raise QueueFullError(self._max_queue)

    def close(self) -> None:
        """Take no more works."""
        with self.inbox_lock:
            self._closed = True

    def enqueue(self, pending: Pending, works: Sequence[Work], priority: int, deadline: float | None) -> None:
        """Queue works: all or none; see `BatchEngine.submit` for the arguments and errors."""
        now = self.clock()
        for sample, work in enumerate(works):
            work.arrival, work.key = now, (now + PATIENCE * (priority + sample), next(self._numbers))
            work.deadline = None if deadline is None else now + deadline
        with self.inbox_lock:
            self.expect_room(len(works))
            try:
                self._pending.update((work.key[1], pending) for work in works)
                self._inbox.extend(works)
                self._submitted += len(works)
            except BaseException:  # an interrupt
                self._count_again()
                raise
        if self._thread is not None:
            self._thread.wake()

    def hint(self, hint: Hint) -> None:
        """Take a hint: now, or when the running step ends. QueueFullError: too many wait for it, or for their time."""
        self.expect_open()
        self._scheduler.prefetches.expect_room(hint)
        if len(self._hints) >= _MOST_HINTS:
            raise QueueFullError(_MOST_HINTS, "hints")
        self._hints.append(hint)
        self.lock.hand_over(self._take_hints)
        if self._thread is not None:
            self._thread.wake()

    def _take_hints(self) -> None:
        while self._hints:
            self._scheduler.prefetches.take(self._hints[0], self.clock())
            self._hints.popleft()
        self._publish()

    def _pause(self) -> float:
        return self._scheduler.prefetches.seconds(self.clock())

    def cancel(self, pending: Pending) -> None:
        """End works: now, or when the running step ends."""
        self.lock.hand_over(partial(self._end_all, pending.works))

    def end_unloaded(self) -> None:
        """End the works whose adapter is not loaded any more: now, or when the running step ends."""
        self.lock.hand_over(self._end_unloaded)

    def _end_unloaded(self) -> None:
        if not self.inbox_lock.inside:
            self._take_inbox()
        for work in list(self._scheduler.works.values()):
            if work.adapter is not None and not work.adapter.loaded.is_loaded:
                self._scheduler.end(work, "error", work.adapter.loaded.unloaded())
        if self._scheduler.ended or self._woken:
            self._tell()

    def cancel_all(self) -> None:
        """End all works."""
        for pending in list(self._pending.values()):
            self.cancel(pending)

    def _end_all(self, works: Iterable[Work]) -> None:
        if not self.inbox_lock.inside:  # else this runs inside a submit of this thread
            self._take_inbox()
        for work in works:
            if work.key[1] in self._scheduler.works:
                self._scheduler.end(work, "cancelled")
            elif work.reason is None:  # it is in the inbox, from which it goes nowhere
                work.reason = "cancelled"
                self._scheduler.ended.append(work)
        if self._scheduler.ended or self._woken:
            self._tell()

    def wait_for_any(self) -> None:
        """Wait until a work ends, of whichever call.

        Raises:
            InvalidOperationError: this is called inside a step of this thread.
        """
        before = self._finished
        waited = next((each for each in list(self._pending.values()) if not each.is_finished), None)
        if waited is None:  # all have ended; the step that ended them is to tell so
            self.step()
        else:
            waited.wait(lambda: waited.is_finished or self._finished != before)

    # -- a thread -------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """See `BatchEngine.is_running`."""
        thread = self._thread
        return thread is not None and thread.is_alive and not thread.is_current

    def start(self, owner: object) -> None:
        """Run a thread that steps until `stop`, or until `owner` is dropped and all work is done; see `BatchEngine`."""
        with self.lock:
            self.expect_open()
            if self._thread is None or not self._thread.is_alive:
                self._thread = StepThread(owner, self.step_or_fail, self._pause)

    def stop(self) -> None:
        """End the thread, if there is one, when all work is done."""
        if self._thread is not None:
            self._thread.stop()

    # -- a step ---------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """See `BatchEngine.step`."""
        with self.lock:
            self._take_inbox()
            began = self.clock()
            self._scheduler.expire(began)
            self._scheduler.prefetches.advance(began)
            if self._scheduler.observed.any_evicted:  # for hints
                self._scheduler.observed.note_evictions([], self._pending)
            # Texts with equal first tokens become neighbours, of which attention reads shared blocks once.
            pieces = sorted(self._scheduler.plan(began), key=lambda piece: piece[0].opening)
            self._note_evictions(pieces)
            decodes = sum(work.remaining == 1 for work, _ in pieces)
            rows = sum(n for work, n in pieces if work.remaining == 1)
            prefilled = sum(n for work, n in pieces if work.remaining > 1)
            read = sum(pairs(n, work.computed) for work, n in pieces if work.remaining > 1)
            for kind in sorted({(work.regime, work.head) for work, _ in pieces}):
                self._pass([(work, n) for work, n in pieces if (work.regime, work.head) == kind and work.seq_id >= 0])
            if pieces:
                self._steps += 1
                self._prefilled += prefilled
                if self._scheduler.arrivals is not None:
                    self._scheduler.arrivals.measured(prefilled, self.clock() - began)
                seconds = self.clock() - began
                self._scheduler.budget.observe(decodes, prefilled, seconds, read)
                drafter = self._scheduler.drafter
                if rows:
                    drafter.ran(rows, None if prefilled else seconds - drafter.seconds)
            self._tell()
            busy = bool(self._scheduler.works)
        self._scheduler.observed.deliver()
        return busy

    def _note_evictions(self, pieces: list[tuple[Work, int]]) -> None:
        if not self._scheduler.observed.any_evicted:
            return
        blocks_for = self._scheduler.pool.blocks_for
        takers = [work for work, n in pieces if blocks_for(work.computed + n) > blocks_for(work.computed)]
        takers = takers or [work for work, _ in pieces]  # a copy of a shared block; the taker was preempted
        self._scheduler.observed.note_evictions([work.key[1] for work in takers], self._pending)

    def step_or_fail(self) -> bool:
        """Step in a thread: an error ends all works, so that nobody waits for them for ever."""
        try:
            return self.step()
        except BaseException as error:
            failure = as_failure(error, "step")
            with self.lock:
                for work in list(self._scheduler.works.values()):
                    self._scheduler.end(work, "error", failure)
                self._tell()
            return True

    def _pass(self, pieces: list[tuple[Work, int]]) -> None:
        """Run pieces together; where that fails one by one, so that a work at fault ends alone."""
        if not pieces:
            return
        try:
            logits = self.forward.run([(work, n, work.rows_due(n)) for work, n in pieces])
        except BaseException as error:  # of the network, a policy or a format, or of memory
            failure = as_failure(error, "model.forward")
            if len(pieces) == 1:
                if (again := self._scheduler.give_room(failure, *pieces[0])) is None:
                    self._scheduler.end(pieces[0][0], "error", failure)
                else:
                    self._pass(again)
                return
            logger.warning("a pass over %d requests failed; they run one by one: %s", len(pieces), short(failure))
            for work, n in pieces:
                self._pass(self._scheduler.again(work, n))
            return
        now = self.clock()
        self._masks.prepare([
            due for (work, _), rows in zip(pieces, logits, strict=True) if len(rows)
            for each in (work, *work.followers) for due in each.masks_due(len(rows) if each is work else 1)
        ])
        for (work, n), rows in zip(pieces, logits, strict=True):
            computed = work.computed + n
            ready = bool(len(rows) and work.followers) and computed >= work.num_prompt
            # Followers need the leader's sequence, which ends with it; its first token comes before theirs.
            followers = self._fork(work, computed, now) if ready else []
            self._take(work, work.computed, n, rows, now)
            for follower in followers:
                self._take(follower, computed, 0, rows[-1:], now)

    def _take(self, work: Work, start: int, n: int, rows: Float32, now: float) -> None:
        """Give a work the logits of a piece that has run."""
        before, wrong, held = work.num_tokens, 0, 0
        if len(rows):
            try:
                held = work.take(rows, start)
            except BaseException as error:  # of a logits processor, or logits that are not finite
                self._scheduler.end(work, "error", as_failure(error, "logits_processor"))
                return
            finally:
                self._count_new(work, now)
            if drafted := max(0, start + n - before):
                wrong = drafted - max(0, work.num_tokens - before - 1)  # the last one counts as drawn, not as run
                self._drafted += drafted
                self._accepted += held
        try:
            self._scheduler.ran(work, n - wrong, wrong)
        except BaseException as error:  # of a policy, or of memory
            self._scheduler.end(work, "error", as_failure(error, "eviction_policy.keep"))
            return
        if (reason := work.ending()) is not None:
            self._scheduler.end(work, reason)
        elif len(rows) and (pending := self._pending.get(work.key[1])) is not None:
            self._woken.append(pending)

    def _count_new(self, work: Work, now: float) -> None:
        """Count the new tokens of a work, those too that it drew before a later one failed."""
        new = work.num_tokens - work.num_prompt - len(work.times)
        if new:
            self._scheduler.observed.drew(work, now, new)
        work.times.extend([now] * new)
        self._new_tokens += new

    def _fork(self, leader: Work, computed: int, now: float) -> list[Work]:
        """Begin the other samples of a request whose prompt has run; those for which there is room."""
        begun: list[Work] = []
        for follower in list(leader.followers):
            try:
                self._scheduler.fork(leader, follower, computed, now)
            except MemoryError:
                break
            begun.append(follower)
        self._scheduler.release_followers(leader)
        return begun

    def _take_inbox(self) -> None:
        with self.inbox_lock:  # no submit counts a work twice
            while self._inbox:
                self._scheduler.add(self._inbox[0])
                self._inbox.popleft()

    def _tell(self) -> None:
        """Count the works that have ended, publish the counters, and wake those that wait for an end or a token."""
        ended = self._scheduler.ended
        while ended:
            pending = self._pending.get(ended[-1].key[1])
            if pending is not None:
                self._woken.append(pending)
                self._finished += 1
                self._cached_tokens += ended[-1].cached_tokens
                self._pending.pop(ended[-1].key[1])
            ended.pop()
        self._publish()
        if self._woken:
            Pending.wake_all(self._woken)
            self._woken.clear()

    # -- invariants and reports -----------------------------------------------------------------------------

    def _mend(self) -> None:
        self._scheduler.mend()
        with self.inbox_lock:
            alive = {*self._scheduler.works, *(work.key[1] for work in self._inbox)}
            pending = dict(self._pending)
        for number in pending:
            if number not in alive:
                self._pending.pop(number, None)
                self._finished += 1
        Pending.wake_all([*pending.values(), *self._woken])
        self._woken.clear()
        self._scheduler.ended.clear()
        self._count_again()
        self._publish()

    def _count_again(self) -> None:
        """Count the works that were submitted: those that have ended, and those that have not."""
        self._submitted = self._finished + len(self._pending)

    def stats(self) -> BatchStats:
        """See `BatchEngine.stats`."""
        if self._is_stale and not self.lock.inside:  # the last publication had no memory, or an interrupt ended it
            self.lock.hand_over(self._publish)
        last, blocks = self._published, self._scheduler.pool.count()
        return replace(
            last, waiting=self._submitted - last.running - last.finished, free_blocks=blocks["free"],
            claimed_blocks=blocks["claimed"], cached_blocks=blocks["cached"],
            pinned_blocks=self._scheduler.pins.num_blocks,
        )

    def _publish(self) -> None:
        """Bring the counters up to date. Without memory `stats` does it later: a cancellation needs none."""
        self._is_stale = True
        with suppress(MemoryError):
            self._count()
            self._is_stale = False

    def _count(self) -> None:
        observed = self._scheduler.observed
        self._published = BatchStats(
            0, self.num_running, self._finished, self._steps, self._prefilled, self._new_tokens, self._cached_tokens,
            self._scheduler.preemptions, self._drafted, self._accepted, 0, 0, 0, 0, observed.queued.snapshot(),
            observed.first_token.snapshot(), observed.gap.snapshot(),
            hints=sum(self._scheduler.prefetches.counts.values()),
            prefetched_tokens=self._scheduler.prefetches.read_tokens,
        )

    def namespaces(self) -> dict[Hashable, NamespaceStats]:
        """See `BatchEngine.namespace_stats`."""
        found, pinned = self._scheduler.observed.namespaces(), self._scheduler.pins.namespaces()
        return {name: replace(each, pinned_tokens=pinned.get(name, 0)) for name, each in found.items()}

    def release_pins(self) -> None:
        """Release all pins, and read nothing for others: now, or when the running step ends."""
        self.lock.hand_over(self._scheduler.prefetches.clear)
        self.lock.hand_over(self._scheduler.pins.clear)

    def check(self) -> None:
        """Verify the invariants; AssertionError says what is wrong."""
        with self.lock:
            self._scheduler.check()
            missing = set(self._scheduler.works) - set(self._pending) - self._scheduler.seen_texts.numbers
            assert not missing, f"works {sorted(missing)} would tell nobody of their end"
