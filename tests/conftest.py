"""Fixtures of all tests, and the amount of work of random tests.

--all, --rest       every test; those that `pytest` leaves out by itself (tests/support/selection.py)
--long              an hour's worth of random examples and of load
KVCACHE_TESTS=fast  a tenth of most random examples, half of the failing allocations, every second value of some
                    parameters (pace.py), for builds that run slowly (sanitizers, bounds checks)
"""

import gc
import os

# Set before NumPy is loaded: on a busy machine the threads of BLAS spin for each other, which takes many times as long.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import pytest
from engines import DenseEngine
from hypothesis import HealthCheck, settings
from pace import FAST
from places import GOLDEN
from selection import is_machine, select

from kvcache import get_num_threads, set_num_threads
from kvcache.engine import InferenceEngine, Transformer

# No deadlines: a busy machine must not fail a test.
settings.register_profile("any time", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("short", max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fast", max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))


LONGER = 30  # factor of the random examples with --long


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="every test, with every value of its parameters")
    parser.addoption("--rest", action="store_true", help="the tests that pytest leaves out by itself")
    parser.addoption("--long", action="store_true", help="an hour's worth of random examples and of load")


def is_short(config):
    """Whether pytest runs what it runs by itself."""
    return not (config.getoption("--all") or config.getoption("--rest") or config.getoption("--long"))


def pytest_configure(config):
    """Choose the random examples, before tests are imported, which name their own."""
    settings.load_profile("fast" if FAST else "short" if is_short(config) else "any time")


def pytest_collection_modifyitems(config, items):
    """Leave out what was not asked for; scale the examples of state machines."""
    select(config, items)
    machines = {item.cls for item in items if is_machine(item.cls)}
    times = LONGER if config.getoption("--long") else 0.1 if FAST else 0.2 if is_short(config) else 1
    for machine in machines:
        examples = max(1, int(machine.settings.max_examples * times))
        machine.settings = settings(machine.settings, max_examples=examples)


@pytest.fixture(scope="module", autouse=True)
def collect_only_what_is_new():
    """Make each gc.collect() examine only the objects of the current module: 10 times as fast."""
    gc.freeze()


@pytest.fixture(scope="session")
def long(request):
    """True if --long was given."""
    return request.config.getoption("--long")


@pytest.fixture(scope="session")
def network():
    """The network of a golden checkpoint; tests of failures wrap it."""
    return Transformer.from_pretrained(GOLDEN / "llama")


@pytest.fixture(params=[DenseEngine, InferenceEngine])
def make(request, network):
    """Makes engines with the naive cache and with the real one."""

    def make_engine(model=network, **options):
        return request.param(model, **options)

    return make_engine


@pytest.fixture
def engine(make):
    return make()


@pytest.fixture
def two_threads():
    """Two threads for kernels, whatever this machine has."""
    before = get_num_threads()
    set_num_threads(2)
    yield
    set_num_threads(before)


@pytest.fixture
def rng():
    return np.random.default_rng(20)
