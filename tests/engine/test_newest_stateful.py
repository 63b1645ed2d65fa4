"""A prefix-cached engine with a residual, under any requests: attention returns the same as without a cache.

Packed rows in place of unpacked ones are detected at once. There are few blocks and few groups.
"""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from recorded_requests import SETTINGS, RecordedRequests
from recording_network import DIM, KV_HEADS, LAYERS, RecordingNetwork

from kvcache import Calibration

CALIBRATION = Calibration(np.random.default_rng(1).standard_normal((LAYERS, KV_HEADS, DIM)))


class Requests(RecordedRequests):
    tolerance = 2e-5

    @initialize(
        length=st.sampled_from([2, 7, 12, 16, 17, 48, 64]), blocks=st.sampled_from([1, 6, 40, 600]),
        calibrated=st.booleans(),
    )
    def start(self, length, blocks, calibrated):
        self.begin(
            RecordingNetwork, blocks, dtype="q2", residual_length=length, num_blocks=40,
            calibrate=CALIBRATION if calibrated else False,
        )

    def most_run(self, count):
        """The group in which the cached blocks end, and the tokens after it."""
        end, length = min(count // 16 * 16, count - 1), self.options["residual_length"]
        return count - end // length * length


TestRequests = Requests.TestCase
TestRequests.settings = SETTINGS
