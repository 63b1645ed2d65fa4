"""`write_and_attend` is `write_ragged` and `attention` of the same tokens, bit for bit."""

import numpy as np
import pytest

from kvcache import PagedKvCache


@pytest.mark.parametrize("options", [{"dtype": "f32"}, {"dtype": "q8"}, {"dtype": "q4", "residual_length": 12}])
def test_one_call_for_two(rng, options):
    one, two = (PagedKvCache(20, 8, 2, 16, **options) for _ in range(2))
    ids, lens = np.array([3, 7], np.uint64), np.array([5, 1])
    for cache in (one, two):
        cache.allocate_batch(ids, [0, 9])
    for _ in range(4):
        keys, values = rng.standard_normal((2, 6, 2, 16), np.float32)
        queries = rng.standard_normal((6, 4, 16), np.float32)
        for cache in (one, two):
            cache.append_batch(ids, lens)
        one.write_ragged(0, ids, lens, keys, values)
        want = one.attention(0, queries, ids, query_lens=lens, scale=0.3)
        for count in (lens, lens.tolist(), lens.astype(np.int32)):
            got = two.write_and_attend(0, ids, count, keys, values, queries, scale=0.3)
            np.testing.assert_array_equal(got, want)
    with pytest.raises(IndexError):
        two.write_and_attend(1, ids, lens, keys, values, queries)
    with pytest.raises(ValueError, match="queries"):
        two.write_and_attend(0, ids, lens, keys, values, queries[:5])
    with pytest.raises(TypeError, match="lens"):
        two.write_and_attend(0, ids, [5.0, 1.0], keys, values, queries)
