from contextlib import AbstractContextManager
from typing import NamedTuple

class Format(NamedTuple):
    name: str
    bits: int
    quantised: bool
    fitted: bool
    largest: str

FORMATS: dict[str, Format]

class Layout:
    def __init__(
        self,
        block_size: int,
        num_heads: int,
        head_dim: int,
        key_format: str = "f32",
        value_format: str = "f32",
        rotate_keys: bool = False,
        rotate_values: bool = False,
        value_head_dim: int | None = None,
    ) -> None: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def value_head_dim(self) -> int: ...
    @property
    def key_head_bytes(self) -> int: ...
    @property
    def value_head_bytes(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...

def simd_level() -> str: ...
def simd_levels() -> tuple[str, ...]: ...
def use_simd(level: str) -> AbstractContextManager[None]: ...
def get_num_threads() -> int: ...
def set_num_threads(n: int) -> None: ...
