from typing import Any, TypeVar

import numpy.typing as npt

Self = TypeVar("Self", bound="AttentionCall")

class AttentionCall:
    scale: float | None
    window: int | None
    chunked: bool
    softcap: float | None
    sinks: Any
    causal: bool
    skip_tokens: int
    top_tokens: int
    return_scores: int
    return_lse: bool
    def __init__(
        self,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: npt.ArrayLike | None = None,
        causal: bool = True,
        skip_tokens: int = 0,
        return_scores: bool | str = False,
        return_lse: bool = False,
        top_tokens: int | None = None,
        chunked: bool = False,
    ) -> None: ...
    def kept(self: Self) -> Self: ...
