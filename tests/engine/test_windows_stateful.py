"""A prefix-cached engine over windows, under any requests: attention has the bits of a run without a cache.

There are few blocks and few pages of windows.
"""

from functools import partial

from hypothesis import strategies as st
from hypothesis.stateful import initialize
from recorded_requests import SETTINGS, RecordedRequests
from windowed_networks import KINDS, network


class Requests(RecordedRequests):
    @initialize(
        kind=st.sampled_from(sorted(KINDS)), dtype=st.sampled_from(["f32", "q8", "q2"]),
        blocks=st.sampled_from([1, 8, 40, 600]), block_size=st.sampled_from([4, 16]),
    )
    def start(self, kind, dtype, blocks, block_size):
        self.begin(
            partial(network, kind), blocks, dtype=dtype, residual_length=0, num_blocks=640 // block_size,
            block_size=block_size,
        )

    def most_run(self, count):
        """The tokens after the last full block."""
        return count - (count - 1) // self.options["block_size"] * self.options["block_size"]


TestRequests = Requests.TestCase
TestRequests.settings = SETTINGS
