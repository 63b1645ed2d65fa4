"""Why a lookup of a `PrefixCache` missed."""

import numpy as np

from kvcache import PrefixCache

SIZE = 2


def test_a_miss_knows_of_other_namespaces_until_they_have_left():
    cache = PrefixCache(1000, SIZE, 1, 1, 8)
    row = np.ones(SIZE * 8, np.float32)

    def reason(tokens, name):
        before = dict(cache.stats().miss_reasons)
        with cache.open_session(tokens, name):
            pass
        after = cache.stats().miss_reasons
        return next(key for key in after if after[key] != before[key])

    for name in range(400):
        cache.store([1, 2, 3, 4], 0, [([row], [row])] * 2, namespace=name)
    cache.store([1, 2, 8, 8], 0, [([row], [row])] * 2, namespace="other")
    assert reason([1, 2, 3, 4], "other") == "namespace"
    assert reason([1, 2, 8, 8], 7) == "namespace"
    assert reason([8, 8], 7) == "no_shared_prefix"
    cache.evict(1)  # the tail of namespace 0
    assert reason([1, 2, 3, 4], 0) == "evicted"
    cache.clear()
    assert reason([1, 2, 3, 4], "other") == "no_shared_prefix"
    cache.check()
