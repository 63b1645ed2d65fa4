"""Fixtures that every test may use."""

import numpy as np
import pytest

from kvcache import _kernels


@pytest.fixture(params=_kernels.simd_levels())
def simd(request):
    """Each SIMD level of this CPU in turn; what runs is asked from the table itself, not from the request."""
    with _kernels.use_simd(request.param):
        assert _kernels.simd_level() == request.param
        yield request.param


@pytest.fixture
def rng():
    return np.random.default_rng(20)
