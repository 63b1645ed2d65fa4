class Policy:
    counts: bool

class LRU(Policy): ...

class LFU(Policy):
    age: int
    def __init__(self, age: int = 1000) -> None: ...
