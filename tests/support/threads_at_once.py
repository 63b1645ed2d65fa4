"""Works in several threads that begin at once; the first error of one, and an error if one does not end."""

import threading


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
