"""Which works run in a step, and how many tokens of each.

There are no phases. Each work catches up with its tokens: those that are written run one token, those whose prompt
runs share the time that the `TokenBudget` leaves, as `Shares` says: short prompts do not wait for long ones. Works
begin in the order of their keys. One begins when there is room for all its tokens. Where a running work needs blocks
that are not there, or one that waits comes before the last that runs and has no room or place, the last one in the
order of keys gives up its sequence. It begins again later, with the blocks of it that are still cached.

    key    (arrival + 10 s * (priority + number of the sample), number of the work)

So a work of a higher number of priority waits as if it had come later. It never waits for ever, and a work that was
preempted is among the first to begin again. Requests share the memory rather than samples: the second sample of one
counts as a request that came 10 s after it, so that a request of many samples gives up these before a request of one
sample stops. Requests of one sample and one priority never stop for those that come after them.
"""

from __future__ import annotations

import heapq
from bisect import insort

from kvcache.drafts.drafter import Drafter
from kvcache.errors import KvCacheError, OutOfMemoryError, SpillError
from kvcache.serving.budget import CHEAP_ROWS, MOST, TokenBudget
from kvcache.serving.observed import Observed
from kvcache.serving.pins import Pins
from kvcache.serving.prefetches import Prefetches
from kvcache.serving.seen_texts import SeenText, SeenTexts
from kvcache.serving.shares import Shares, fitting
from kvcache.serving.work import FinishReason, Work
from kvcache.texts.arrivals import Arrivals
from kvcache.texts.forward import Forward

__all__ = ["PATIENCE", "Scheduler"]

PATIENCE = 10.0  # seconds per number of priority
_TOKENS_PER_ROW = 8  # tokens of prompts that may run in a step, for each row of decodes and draft tokens beside them
Pieces = list[tuple[Work, int]]


class Scheduler:
    """The works that wait and those that run.

    Args:
        forward: the passes, and the memory.
        arrivals: what tiers deliver; None: there are no tiers.
        budget: prompt tokens per step.
        max_running: the most works that run at a time.
        most_prompts: prompts of which a step may run a piece.
        most_rows: the most rows of logits of a step for works that need one for each token.
        observed: counts.
        drafter: gives works their draft tokens.

    Attributes:
        drafter: see above.
        works: all that have not ended, in the order of submission.
        running: those with a sequence, by their keys.
        num_running, num_waiting: those with and without one, but for `seen_texts`.
        ended: works that have ended, until the engine has told those that wait for them.
        preemptions: how often a work gave up its sequence.
        pins: prefixes that stay cached for a time.
        seen_texts: works of cached texts that others see parts of, which come and go with these.
        prefetches: takes hints.
    """

    def __init__(
        self, forward: Forward, arrivals: Arrivals | None, budget: TokenBudget, max_running: int, most_prompts: int,
        most_rows: int, observed: Observed, drafter: Drafter,
    ) -> None:
        self.drafter = drafter
        self.pool, self.arrivals, self.budget, self.observed = forward.pool, arrivals, budget, observed
        self._forward, self._max_running, self._most_rows = forward, max_running, most_rows
        cache = self.pool.counted.caches[0]
        self._reads_f16 = cache.residual_length > 0 or cache.first_tokens > 0
        self._most_prompts = most_prompts
        self.works: dict[int, Work] = {}
        self.pins, self._now = Pins(self.pool), 0.0
        self.seen_texts = SeenTexts(self.pool)
        self.prefetches = Prefetches(self.pool, arrivals, self.pins)
        self.running: list[Work] = []
        self._waiting: list[Work] = []  # a heap; ended works leave it when they come to its top
        self._deadlines: list[tuple[float, int]] = []  # a heap
        self._blocked: Work | None = None  # had no room when it was the first that waits, and none was freed since
        self.ended: list[Work] = []
        self.preemptions = 0

    @property
    def num_running(self) -> int:
        if not self.seen_texts.numbers:
            return len(self.running)
        return sum(work.key[1] >= 0 for work in self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.works) - len(self.seen_texts.numbers) - self.num_running

    # -- works come and go ----------------------------------------------------------------------------------

    def add(self, work: Work) -> None:
        """Queue a work, or make it follow its leader."""
        if work.key[1] in self.works or work.reason is not None:
            return  # an interrupt has left it in the inbox
        self.works[work.key[1]] = work
        if (reason := work.ending()) is not None:  # no token is asked for
            self.end(work, reason)
            return
        if work.deadline is not None:
            heapq.heappush(self._deadlines, (work.deadline, work.key[1]))
        if work.leader is None:
            heapq.heappush(self._waiting, work)
        else:
            work.leader.followers.append(work)

    def end(self, work: Work, reason: FinishReason, error: Exception | None = None) -> None:
        """End a work, whatever it does; a second call does nothing."""
        if work.key[1] not in self.works:
            return
        if work.reason is None:
            # In one step; the reason last: a thread that sees it without the lock finds the error too.
            work.__dict__.update(trace=getattr(error, "__traceback__", None), error=error, reason=reason)
        if self.arrivals is not None:
            self.arrivals.ended(work)
        if isinstance(work, SeenText):
            self._end_seen(work, error)
        self._leave(work)
        if work.prefix is not None:
            for text in self.seen_texts.left_by(work):
                self.end(text, "cancelled")
        self.drafter.end(work)
        self.release_followers(work)
        self.ended.append(work)
        self.works.pop(work.key[1], None)
        if len(self._waiting) > 2 * len(self.works) + 64:  # most have ended
            self._waiting = sorted(each for each in self._waiting if each.reason is None)
        if len(self._deadlines) > 2 * len(self.works) + 64:
            self._deadlines = sorted(each for each in self._deadlines if each[1] in self.works)

    def _end_seen(self, text: SeenText, error: Exception | None) -> None:
        """Give a text that has run to those that lack it; where it failed, so do they."""
        if text.reason == "length":
            self.seen_texts.give(text)
        self.seen_texts.ended(text)
        for work in list(text.seen_by) if error is not None else ():
            self.end(work, "error", error)

    def _leave(self, work: Work) -> None:
        """Take a work's sequence; those that wait for it wait on their own from now on."""
        self.pool.stop(work)
        if work in self.running:
            self.running.remove(work)
        self._blocked = None
        while work.parked:
            heapq.heappush(self._waiting, work.parked[-1][1])
            work.parked.pop()

    def release_followers(self, work: Work) -> None:
        """Let works wait on their own that would have followed this one."""
        while work.followers:
            work.followers[-1].leader = None
            heapq.heappush(self._waiting, work.followers[-1])
            work.followers.pop()

    def preempt(self, work: Work) -> None:
        """Take a work's sequence; it waits again, and its full blocks stay cached."""
        self.pool.index(work)
        self._leave(work)
        work.preemptions += 1
        self.preemptions += 1
        heapq.heappush(self._waiting, work)

    def expire(self, now: float) -> None:
        """End the works whose deadline has come, and release the pins whose time has."""
        self._now = now
        if self.pins.expire(now):
            self._blocked = None
        while self._deadlines and self._deadlines[0][0] <= now:
            work = self.works.get(self._deadlines[0][1])
            if work is not None:
                self.end(work, "deadline")
            heapq.heappop(self._deadlines)

    # -- a step ---------------------------------------------------------------------------------------------

    def plan(self, now: float) -> Pieces:
        """The pieces of the next step, `(work, number of its next tokens)`; their sequences have room for them."""
        regime = self._forward.regime
        for work in [] if self._forward.regime_of is None else list(self.running):
            if regime(work.reach) != work.regime:  # it runs again from its start, in its new regime
                self._leave(work)
                heapq.heappush(self._waiting, work)
        if self.arrivals is not None:
            self._jump(self.arrivals)
        self._give_way()
        self._begin(now)
        ready = [work for work in self.running if work.prefix is None or not self.pool.lacking(work)]
        decodes = [(work, 1) for work in ready if work.remaining == 1]
        prompts = [work for work in ready if work.remaining > 1]
        count, most = len(decodes), CHEAP_ROWS
        if prompts or self._may_begin:  # each row costs time then: few draft tokens where few tokens of prompts may run
            deepest = max((work.computed for work in prompts), default=0)
            tokens = max(self.budget.least(count), self.budget.tokens(self.budget.seconds(count), deepest))
            most = min(most, tokens // _TOKENS_PER_ROW)
        pieces = self._draft(decodes, most)
        if prompts:
            drafts = sum(n for _, n in pieces) - count
            shares = Shares(self.budget, count, drafts, self._most_prompts, self._most_rows)
            shares.divide(prompts)
            pieces += shares.pieces
        return self._fit(pieces)

    @property
    def _may_begin(self) -> bool:
        first = self._first_waiting()
        if first is None or first is self._blocked:
            return False
        if len(self.running) < self._max_running:
            return True
        if self._reads_f16:  # such tokens have memory for that many texts, and for one more that all of these wait for
            is_one_more = first.key[1] < 0 and len(self.running) == self._max_running
            return is_one_more and all(map(self.pool.lacking, self.running))
        return first.key[1] < 0 or self.num_running < self._max_running

    def _first_waiting(self) -> Work | None:
        """The first work that waits; those that have ended or begun leave the heap."""
        while self._waiting and (self._waiting[0].reason is not None or self._waiting[0].seq_id >= 0):
            heapq.heappop(self._waiting)
        return self._waiting[0] if self._waiting else None

    def _give_way(self) -> None:
        """Let the last work that runs give up its sequence for one that comes before it and may not begin otherwise.

        Works that share nothing keep theirs: they would run again from their starts.
        """
        first = self._first_waiting()
        if first is not None and self.running and not self._may_begin:
            last = self.running[-1]
            if first < last and last.shares:
                self.preempt(last)

    def _jump(self, arrivals: Arrivals) -> None:
        """Let works begin again whose blocks have arrived from tiers."""
        arrivals.keep({*self.works.values(), *self.prefetches.texts})
        for work in list(self.running):
            if arrivals.reaches_past(work, work.left_at):
                work.left_at = work.computed
                self._leave(work)
                heapq.heappush(self._waiting, work)

    def _draft(self, decodes: Pieces, most: int) -> Pieces:
        """Add the draft tokens of works; together with the decodes they are at most `most` rows."""
        self.drafter.give([work for work, _ in decodes if not work.followers], most - len(decodes))
        drafted = []
        for work, count in decodes:
            draft = 0 if work.followers else len(work.draft)
            if draft and self._forward.regime(work.reach + draft) != work.regime:
                draft = 0
            drafted.append((work, count + draft))
        return drafted

    def _fit(self, pieces: Pieces) -> Pieces:
        """Make room for pieces, by preemption where there is no other way; those that remain.

        One that does not fit alone fails.
        """
        while pieces:
            try:
                self.pool.append(pieces)
                break
            except (OutOfMemoryError, SpillError) as error:
                if isinstance(error, SpillError) and not error.is_full:  # it does not say whose
                    for work, _ in pieces:
                        self.end(work, "error", error)
                    return []
                if any(count > work.remaining for work, count in pieces):  # rather than for draft tokens
                    pieces = [(work, min(count, work.remaining)) for work, count in pieces]
                    continue
                last = self.running[-1]
                if not self._give_room(error):
                    self.end(last, "error", error)
                pieces = [piece for piece in pieces if piece[0].seq_id >= 0]
        return pieces

    def _give_room(self, error: Exception) -> bool:
        """Release a pin, or preempt the last work, where another one goes on with its memory; whether there was one.

        After a full disk none begins before one ends: blocks are there, and their bytes have no room.
        """
        if self.pins.give_way():
            return True
        if len(self.running) == 1:
            return False
        self.preempt(self.running[-1])
        if isinstance(error, SpillError):
            self._blocked = self._first_waiting()
        return True

    def give_room(self, error: Exception, work: Work, count: int) -> Pieces | None:
        """The piece of a work whose pass found neither memory nor the file with room, once others have given theirs.

        None: this is another error, or there are no others.
        """
        if not isinstance(error, SpillError) or not error.is_full or not self._give_room(error):
            return None
        self.pool.clear()  # what was preempted is cached
        return self.again(work, count)

    def _begin(self, now: float) -> None:
        """Begin works that wait, one after another, as long as there is room: what is cached of each is known then."""
        while self._may_begin:
            work = self._waiting[0]
            work.regime = self._forward.regime(work.reach)
            work.space = self._forward.space_of(work)
            if isinstance(work, SeenText) and self._is_there(work):
                self.end(work, "length")
                continue
            if self._park(work):
                heapq.heappop(self._waiting)
                continue
            if self.arrivals is not None:
                self.arrivals.begin(work)
            if not self._start(work):
                if self.running:
                    self._blocked = work
                    return
                needed = self.pool.blocks_for(work.num_tokens)
                self.end(work, "error", OutOfMemoryError(needed, self.pool.total_blocks))
                continue
            heapq.heappop(self._waiting)
            self._run(work)
            self.pins.renew(work, now)
            for text in () if work.prefix is None else self.seen_texts.asked(work):
                self.works[text.key[1]] = text
                heapq.heappush(self._waiting, text)
            if work.started is None:
                work.started, work.cached_tokens = now, work.computed
                if work.key[1] >= 0:
                    self.observed.began(work, now)
            elif work.computed > work.left_at >= 0 and work.num_tokens == work.num_prompt:
                self.observed.arrived(work, work.computed - work.left_at)

    def _is_there(self, text: SeenText) -> bool:
        """Whether all of a text that nothing waits for is cached, and need not run; it counts as used then."""
        if text.seen_by or not self.seen_texts.is_cached(text):
            return False
        text.cached_tokens = text.num_tokens
        for stop, seconds in text.keep:
            self.pins.add(text, stop, seconds, self._now)
        return True

    def _start(self, work: Work) -> bool:
        """Give a work a sequence, if there is room, or pins give way; whether it has one."""
        arrived = None if self.arrivals is None else self.arrivals.arrived
        while not self.pool.start(work, [*self.running, *self.pins.all], arrived):
            if not self.pins.give_way():
                return False
        for stop, _ in work.keep:
            if work.computed < stop < work.num_tokens and stop not in work.keep_at:
                insort(work.keep_at, stop)
        return True

    def _run(self, work: Work) -> None:
        """Put a work that has a sequence among those that run, in the order of keys."""
        place = len(self.running)
        while place and work < self.running[place - 1]:
            place -= 1
        self.running.insert(place, work)

    def _park(self, work: Work) -> bool:
        """Let a work wait for a running one that is about to compute a longer prefix of it; whether there is one."""
        if not work.shares:
            return False
        best, place = None, self.pool.shared.longest(work)
        for other in self.running:
            if other.remaining > 1 and other.shares and other.space == work.space:
                most = min(work.num_tokens - 1, other.num_tokens, work.shares_to, other.shares_to)
                differ = work.tokens[:most] != other.tokens[:most]
                common = int(differ.argmax()) if differ.any() else most
                common -= common % self.pool.block_size
                if common > max(place, other.computed):
                    best, place = other, common
        if best is not None:
            best.parked.append((place, work))
        return best is not None

    def ran(self, work: Work, count: int, wrong: int = 0) -> None:
        """Note that the next `count` tokens of a work have run: full blocks enter the index.

        Args:
            wrong: draft tokens behind them that ran too, and were not drawn.
        """
        size = self.pool.block_size
        filled = (work.computed + count) // size > work.computed // size
        self.pool.ran(work, count, wrong)
        self.pool.compact(work)
        if filled:
            self.pool.index(work)
        while work.keep and work.keep[0][0] <= work.computed:
            self.pins.add(work, *work.keep[0], self._now)
            work.keep.pop(0)
        for entry in [entry for entry in work.parked if entry[0] <= work.computed]:
            self.pool.keep(work, entry[0])
            heapq.heappush(self._waiting, entry[1])
            work.parked.remove(entry)

    def again(self, work: Work, count: int) -> Pieces:
        """The piece of a work whose pass has failed beside others; from further before, where its state is lost.

        None is left if there is no room for that: the work begins again later, as one that was preempted.
        """
        if work.seq_id < 0:  # it was preempted meanwhile
            return []
        start = self.pool.nearest(work, work.computed)
        if start == work.computed:
            return [(work, count)]
        try:
            self.pool.expect(work, start)
            self.pool.cut(work, start)
            count = fitting(work, MOST, self._most_rows)
            self.pool.append([(work, count)])
        except KvCacheError:
            self.preempt(work)
            return []
        return [(work, count)]

    def fork(self, work: Work, follower: Work, computed: int, now: float) -> None:
        """Begin a follower with the sequence of its leader, whose prompt has run.

        Raises:
            OutOfMemoryError: as many works run as may; or they share nothing.
        """
        if self.num_running >= self._max_running or not work.shares:
            raise OutOfMemoryError(1, 0, "places")
        self.pool.fork(work, follower, computed)
        follower.regime, follower.space, follower.started = work.regime, work.space, now
        follower.cached_tokens, follower.hidden = work.cached_tokens, work.hidden
        follower.cached_texts.update(work.cached_texts)
        self.observed.began(follower, now)
        self._run(follower)
        follower.leader = None
        work.followers.remove(follower)

    # -- after an exception ---------------------------------------------------------------------------------

    def mend(self) -> None:
        """Let all works begin again behind what is cached of them; may run at any time, any number of times."""
        for work in self.works.values():
            work.moved(-1, 0, ())
        self.works = {number: work for number, work in self.works.items() if work.reason is None and number >= 0}
        self.seen_texts.clear()
        self.pool.shared.close_sessions()  # a call that an error ended may not have
        self.pool.settle()
        self.pins.settle()
        self.drafter.settle()
        for work in self.works.values():
            work.mend()
            work.leader, work.followers, work.parked = None, [], []
        self.running, self._waiting, self._blocked = [], sorted(self.works.values()), None
        self._deadlines = sorted((w.deadline, w.key[1]) for w in self.works.values() if w.deadline is not None)
        for work in list(self.works.values()):  # one may have drawn its last token
            if (reason := work.ending()) is not None:
                self.end(work, reason)

    def check(self) -> None:
        """Verify the invariants; AssertionError says what is wrong."""
        with self.pins.released():
            self.pool.check(self.running)
        self.drafter.check()
        self.prefetches.check()
        assert self.running == sorted(self.running), "works do not run in the order of their keys"
        parked = {id(work) for leader in self.running for _, work in leader.parked}
        heap = {id(work) for work in self._waiting}
        for number, work in self.works.items():
            assert work.key[1] == number, f"{work}: it has the number {work.key[1]}, not {number}"
            assert work.reason is None, f"{work}: it has ended"
            assert work.computed < work.num_tokens, f"{work}: nothing is left to run"
            if work.seq_id >= 0:
                assert work in self.running, f"{work}: it has a sequence and does not run"
            elif work.leader is not None:
                assert work in work.leader.followers, f"{work}: its leader does not know it"
                assert work.leader.key[1] in self.works, f"{work}: its leader has ended"
            else:
                assert id(work) in heap or id(work) in parked, f"{work}: it neither runs nor waits"
