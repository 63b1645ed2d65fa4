from collections.abc import Sequence

class Layouts:
    num_layers: int
    key_dtype: str | tuple[str, ...]
    value_dtype: str | tuple[str, ...]
    index: tuple[int, int, str] | None
    def __init__(
        self,
        num_layers: int,
        block_size: int,
        num_heads: int,
        head_dim: int,
        key_dtype: str | Sequence[str],
        value_dtype: str | Sequence[str],
        rotate: bool | str,
        value_head_dim: int | None,
        separate: bool,
        latent: bool,
        index: tuple[int, int, str] | None = None,
    ) -> None: ...
    @property
    def rotated(self) -> tuple[bool, bool]: ...
