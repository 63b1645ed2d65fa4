"""Which folders are safe to write to: those where no other user can put something in place of what is written."""

from __future__ import annotations

import os
import stat

from kvcache.support.descriptors import kind_of

__all__ = ["expect_private", "is_own"]


def is_own(status: os.stat_result) -> bool:
    """Whether a file belongs to this user or to root."""
    return status.st_uid in (os.geteuid(), 0)


def expect_private(status: os.stat_result, path: str, expected: str, shared: bool = False) -> None:
    """Raise PermissionError unless a folder belongs to this user or to root, and nobody else may write to it.

    Args:
        expected: what the message says is expected.
        shared: whether it may belong to anybody, and a group may write to it.
    """
    if os.name == "nt":  # a mode says nothing about other users there
        if shared:
            return
        raise PermissionError(f"{path}: expected {expected}, got a folder of Windows, whose access list is not read")
    others = stat.S_IWOTH if shared else stat.S_IWOTH | stat.S_IWGRP
    if status.st_mode & others or not (shared or is_own(status)):
        raise PermissionError(
            f"{path}: expected {expected}, got {kind_of(status.st_mode)} of user {status.st_uid} with mode "
            f"{stat.S_IMODE(status.st_mode):04o}"
        )
