"""Works in several threads that begin at once; the first error of one, and an error if one does not end."""

import threading
import time


def together(*works, count=4):
    """Run each work `count` times, all at once; raise the first error."""
    errors, start = [], threading.Barrier(len(works) * count)

    def run(work, number):
        try:
            start.wait(timeout=300)
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work, i), daemon=True) for work in works for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def longest_pause(work):
    """The part of the time of a work in which another thread could not run at a stretch."""
    worst, done = 0.0, threading.Event()

    def tick():
        nonlocal worst
        last = time.monotonic()
        while not done.is_set():
            time.sleep(0.002)
            worst, last = max(worst, time.monotonic() - last), time.monotonic()

    ticking = threading.Thread(target=tick)
    ticking.start()
    began = time.monotonic()
    try:
        work()
    finally:
        took = time.monotonic() - began
        done.set()
        ticking.join()
    return worst / took
