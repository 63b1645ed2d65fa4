from kvcache.core.calibration import Calibration

class KnownKeys:
    calibration: Calibration | None
