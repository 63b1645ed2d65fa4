"""Every public call with every hostile value in place of each of its arguments.

A call must soon end with a result or with one of a few errors, and the object must be consistent and usable after it.
`hostile.caches` and `hostile.makers` list, for each public class and function, how to make it and a valid call.
"""

import itertools
import random
import time
import warnings

import pytest
from hostile import caches as hostile_caches
from hostile import makers as hostile_makers
from hostile.target import Target
from hostile.values import VALUES

pytestmark = pytest.mark.exhaustive

SOON = 10  # seconds of CPU time for a call; all but a few take less than a millisecond
TARGETS = {
    name.lower(): target
    for module in (hostile_caches, hostile_makers)
    for name, target in vars(module).items()
    if isinstance(target, Target)
}


def single(target):
    """Each hostile value in place of each argument of each call."""
    for name, (_, arguments) in target.calls.items():
        for place, value in itertools.product(range(len(arguments)), VALUES):
            yield name, {place: value}


def several(target, count):
    """Hostile values in place of several arguments, chosen at random."""
    rng = random.Random(0)
    names = [name for name, (_, arguments) in target.calls.items() if len(arguments) > 1]
    for _ in range(count if names else 0):
        name = rng.choice(names)
        places = range(len(target.calls[name][1]))
        yield name, {place: rng.choice(list(VALUES)) for place in rng.sample(places, rng.randrange(2, len(places) + 1))}


CALLS = sum(len(arguments) * len(VALUES) for target in TARGETS.values() for _, arguments in target.calls.values())
assert CALLS >= 12_500, CALLS


def attack(target, cases):
    it = target.make()
    for name, chosen in cases:
        call, good = target.calls[name]
        given = [VALUES[chosen[place]]() if place in chosen else good[place] for place in range(len(good))]
        what = f"{name}: {chosen}"
        start = time.process_time()
        try:
            call(it, *given)
        except target.errors:
            if hasattr(it, "check"):
                it.check()
        except BaseException as error:
            raise AssertionError(f"{what} raised {type(error).__name__}: {error!s:.200}") from error
        else:
            target.works(it)
            it = target.make()
        assert time.process_time() - start < SOON, f"{what} took {time.process_time() - start:.1f} s"
    target.works(it)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.filterwarnings("ignore")
def test_hostile_arguments(name, long, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a string argument may become the name of a file
    target = TARGETS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attack(target, list(single(target)))
        if long:
            attack(target, several(target, 20_000))
