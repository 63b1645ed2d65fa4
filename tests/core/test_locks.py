"""Locks that a thread takes once, queued releases, and turns."""

import gc
import threading
from contextlib import nullcontext

import pytest

from kvcache.core.locks import AllLocks, CallLock, MendingLock
from kvcache.engine.turns import CallInTurn, Turns
from kvcache.errors import InvalidOperationError, OutOfMemoryError


class Books:
    """An object that a `MendingLock` guards."""

    def __init__(self, core=None):
        self.mended, self.fails = 0, False
        self.lock = MendingLock(core or CallLock(), self.mend)

    def mend(self):
        assert self.lock.inside
        if self.fails:
            raise MemoryError
        self.mended += 1


def in_a_thread(function):
    """Start a function in another thread and wait 0.05 s for it; returns `(thread, list of its result)`."""
    done = []
    thread = threading.Thread(target=lambda: done.append(function()), daemon=True)
    thread.start()
    thread.join(0.05)
    return thread, done


def enter(lock):
    with lock:
        return True


@pytest.mark.parametrize("make", [CallLock, lambda: Books().lock], ids=["call", "mending"])
def test_a_thread_enters_once_and_others_wait(make):
    lock = make()
    keep = lock  # a mending lock does not keep its object alive
    with lock:
        assert lock.inside
        with pytest.raises(InvalidOperationError), lock:
            pass
        thread, done = in_a_thread(lambda: enter(lock))
        assert not done
    thread.join()
    assert done == [True]
    assert not keep.inside


def test_a_release_inside_a_call_is_done_when_the_call_ends():
    lock, done = CallLock(), []
    with lock:
        lock.when_free(lambda: done.append(lock.inside))
        lock.hand_over(lambda: done.append(lock.inside))
        assert not done
    assert done == [True, True]
    lock.when_free(lambda: done.append(lock.inside))
    lock.hand_over(lambda: done.append(lock.inside))
    assert done == [True] * 4
    assert not lock.inside


@pytest.mark.parametrize("fails", [False, True])
def test_a_release_inside_a_call_of_a_part_is_done_when_that_call_ends(fails):
    """A signal handler may cancel a request of an engine while a report reads its cache, without the engine's lock."""
    engine, cache, part, done = CallLock(2), CallLock(1), CallLock(0), []

    def release():
        with cache, part:
            done.append(engine.inside)

    def call():
        with cache:
            with part:
                engine.hand_over(release)
                engine.when_free(release)
            assert not done
            if fails:
                raise TimeoutError

    with pytest.raises(TimeoutError) if fails else nullcontext():
        call()
    assert done == [True, True]
    with engine:
        with cache, part:
            engine.hand_over(release)
        assert len(done) == 2
    with part:
        CallLock(0).hand_over(lambda: done.append(part.inside))
    assert done == [True] * 4
    assert not any(lock.inside for lock in (engine, cache, part))


def test_a_release_of_another_thread_is_queued():
    lock, done = CallLock(), []
    with lock:
        thread, handed = in_a_thread(lambda: lock.hand_over(lambda: done.append(threading.get_ident())))
        thread.join()  # it does not wait for the lock
        assert handed
        assert not done
        waiting, later = in_a_thread(lambda: lock.when_free(lambda: done.append("later")))
        assert not later
    waiting.join()
    assert done == [threading.get_ident(), "later"]


def test_errors_of_releases(monkeypatch):
    lock, seen = CallLock(), []
    monkeypatch.setattr("sys.unraisablehook", lambda unraisable: seen.append(unraisable.exc_type))

    def fail(error):
        raise error

    with pytest.raises(OutOfMemoryError):
        lock.when_free(lambda: fail(OutOfMemoryError(1, 0)))
    with lock:
        lock.when_free(lambda: fail(OutOfMemoryError(1, 0)))  # an error of the object's state is ignored
        lock.when_free(lambda: fail(ZeroDivisionError()))
    assert seen == [ZeroDivisionError]
    with lock:
        pass


def test_a_lock_that_is_dropped_while_it_is_taken_is_held_no_more():
    """An interrupt between `__enter__` and its block leaves it so; it is the first of this thread's, or the last."""
    for dropped in (0, 1):
        locks = [CallLock(level=0), CallLock(level=0)]
        for lock in locks:
            lock.__enter__()
        del locks[dropped], lock
        gc.collect()
        locks[0].__exit__(None, None, None)
        released = []
        CallLock(level=1).when_free(lambda done=released: done.append(True))  # else queued until a part's call ends
        assert released == [True]


def test_an_interrupted_release_is_done_again():
    lock, done = CallLock(), []

    def release():
        done.append(len(done))
        if len(done) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), lock:
        lock.when_free(release)
    assert not lock.inside
    with lock:
        pass
    assert done == [0, 1]


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError, InvalidOperationError])
def test_every_exception_is_followed_by_mending(error):
    books = Books()
    with pytest.raises(error), books.lock:
        raise error
    assert (books.mended, books.lock.torn) == (1, False)
    books.fails = True
    with pytest.raises(error), books.lock:
        raise error
    assert books.lock.torn
    with pytest.raises(MemoryError), books.lock:
        raise AssertionError("nobody gets in before it is mended")
    books.fails = False
    with books.lock:
        assert books.mended == 2


def test_a_release_that_fails_is_mended_and_tried_again(monkeypatch):
    seen = []
    monkeypatch.setattr("sys.unraisablehook", lambda unraisable: seen.append(unraisable.exc_type))
    books, tries = Books(), []

    def fail(times):
        tries.append(books.mended)
        if len(tries) <= times:
            raise TimeoutError

    with books.lock:
        books.lock.when_free(lambda: fail(9))
    assert (tries, books.lock.torn, seen) == ([0, 1], False, [TimeoutError])
    tries.clear()
    with pytest.raises(TimeoutError), books.lock:  # the second try works: the error was that of a signal handler
        books.lock.when_free(lambda: fail(1))
    assert len(tries) == 2
    assert not books.lock.inside


def test_releases_wait_until_mending_succeeds():
    books, done = Books(), []
    books.fails = True

    def fail():
        books.lock.when_free(lambda: done.append(1))
        raise TimeoutError

    with pytest.raises(TimeoutError), books.lock:
        fail()
    books.lock.hand_over(lambda: done.append(2))
    assert not done
    books.fails = False
    with books.lock:
        assert done == [1, 2]


def test_many_locks_in_one_order_each_core_once():
    shared = CallLock()
    books = [Books(), Books(shared), Books(shared), Books()]
    for order in (books, books[::-1]):
        with AllLocks(each.lock for each in order):
            assert all(each.lock.inside for each in books)
        assert not any(each.lock.inside for each in books)
    with pytest.raises(ValueError, match="mended"), AllLocks(each.lock for each in books):
        raise ValueError("mended")
    assert [each.mended for each in books] == [1] * 4
    with books[2].lock, pytest.raises(InvalidOperationError), AllLocks(each.lock for each in books):
        pass
    assert not books[0].lock.inside


def test_two_threads_with_locks_in_opposite_orders():
    books = [Books() for _ in range(3)]

    def work(order):
        for _ in range(2000):
            with AllLocks(each.lock for each in order):
                pass

    threads = [threading.Thread(target=work, args=(order,)) for order in (books, books[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_no_thread_waits_for_a_lock_out_of_order():
    engine, cache, later = CallLock(level=2), CallLock(), CallLock()
    for first, second in ((engine, cache), (cache, later)):
        with first, second:  # the fixed order
            pass
        with second, first:  # another order, but the lock is free
            pass
        entered, go_on = threading.Event(), threading.Event()

        def inside(first=first, second=second, entered=entered, go_on=go_on):
            with first:
                entered.set()
                go_on.wait()
                with second:
                    pass

        thread = threading.Thread(target=inside)
        with second:
            thread.start()
            entered.wait()
            with pytest.raises(InvalidOperationError, match="no other call"), first:
                pass
            done = []
            first.when_free(lambda done=done: done.append(1))
            go_on.set()
        thread.join()
        assert done == [1]


def test_a_thread_inside_a_call_does_not_wait_for_a_turn():
    turns, cache = Turns(), CallLock()
    turn = turns.take(0)

    def inside():
        with cache, pytest.raises(InvalidOperationError, match="no other call"):
            turns.take(0)
        return True

    thread, done = in_a_thread(inside)
    thread.join()
    assert done == [True]
    turn.give_back()
    with cache:
        turns.take(0).give_back()


def test_one_turn_at_a_time():
    turns = Turns()
    turn = turns.take(0)
    with pytest.raises(InvalidOperationError):
        turns.take(0)
    thread, done = in_a_thread(lambda: turns.take(0).give_back())
    assert not done
    turn.give_back()
    turn.give_back()
    thread.join()
    assert done
    turns.take(0)  # dropped, so it is given back
    gc.collect()
    turns.take(0).give_back()


def test_a_turn_with_an_old_version_is_taken_away():
    turns = Turns()
    turn = turns.take(3)
    turn.leave(4)
    with pytest.raises(InvalidOperationError):
        turns.take(4)
    other = turns.take(5)
    with pytest.raises(InvalidOperationError, match="changed"):
        turn.go_on(5)
    turn.give_back()  # no effect: it was taken away
    with pytest.raises(InvalidOperationError):
        turns.take(5)
    other.give_back()
    turns.take(5)


def test_a_call_waits_for_turns_of_other_threads_only():
    books, turns = Books(), Turns()
    call = CallInTurn(turns, books.lock)
    with call:
        assert books.lock.inside
        with pytest.raises(InvalidOperationError), call:
            pass
    turn = turns.take(0)
    with call:
        pass
    thread, done = in_a_thread(lambda: enter(call))
    assert not done
    turn.give_back()
    thread.join()
    assert done == [True]
