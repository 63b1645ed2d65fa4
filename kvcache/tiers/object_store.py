"""`ObjectStoreTier`: values in S3, Google Cloud Storage, Azure or a folder, over the caller's store of `obstore`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import TIMEOUT_MAX, Lock
from typing import Any, TypeVar

from kvcache.support.arguments import as_bytes, as_count, as_finite
from kvcache.support.copies import refuse_copies
from kvcache.tiers.keys import KEY_BYTES, as_secret
from kvcache.tiers.protocol import MOST_BYTES, Buffer

__all__ = ["ObjectStoreTier"]

Item = TypeVar("Item")
Found = TypeVar("Found")

_METHODS = ("get_async", "put_async", "head_async", "delete_async", "list")
_PREFIX = re.compile(r"([\w-]+/)*[\w-]*", re.ASCII)
_SHARE = 16  # what a machine may write before it lists the objects again: a 16th of the limit
_DELETED = 1000  # objects in one request, as many as S3 takes


class ObjectStoreTier:
    """Values in an object store. The caller's store decides on addresses, credentials, timeouts and retries.

    A call has several requests at once, and ends after `timeout` seconds. An object that is longer than a value is read
    up to that length and dropped. Machines may share a bucket: an object is whole or absent.

    Give the store few retries: by default they go on for three minutes, and a tier that fails is passed over anyway.
    `retry_config={"max_retries": 1, "retry_timeout": timedelta(seconds=5)}` is an argument of each store.

    Args:
        store: of `obstore.store`, such as `S3Store`, `GCSStore`, `AzureStore`, `LocalStore`.
        secret: 16 to 64 bytes, the same on all machines that share values; see `Tiers`.
        prefix: before the name of each object: letters, digits, "_", "-" and "/" between them.
        max_bytes: the most bytes of all values under `prefix`, an int or a text such as "200GiB": the oldest are
            deleted, for which the store lists them. While several machines write, each may exceed it by a 16th.
            None: no limit; a rule of the bucket may delete old objects.
        concurrency: the most requests of a call at once.
        timeout: seconds of a call.

    Raises:
        TypeError, ValueError: an object without the methods of such a store; another secret, prefix or number.

    Attributes:
        store, secret, prefix, max_bytes, concurrency, timeout: see above.
    """

    def __init__(
        self,
        store: Any,
        *,
        secret: bytes,
        prefix: str = "kvcache/",
        max_bytes: int | str | None = None,
        concurrency: int = 16,
        timeout: float = 30.0,
    ) -> None:
        if missing := [name for name in _METHODS if not callable(getattr(store, name, None))]:
            raise TypeError(f"store: expected one of obstore.store, got {type(store).__name__} without {missing[0]}")
        if not isinstance(prefix, str):
            raise TypeError(f"prefix: expected a str, got {type(prefix).__name__}")
        if not _PREFIX.fullmatch(prefix):
            raise ValueError(f"prefix: expected names with / between them, got {prefix[:100]!r}")
        self.store, self.secret, self.prefix = store, as_secret(secret), prefix
        self.max_bytes = None if max_bytes is None else as_bytes(max_bytes, "max_bytes")
        if self.max_bytes == 0:
            raise ValueError("max_bytes: expected at least 1, got 0")
        self.concurrency = as_count(concurrency, "concurrency", 1, 1024)
        self.timeout = as_finite(timeout, "timeout", 0.001)
        self._own = re.compile(rf"{re.escape(prefix)}[0-9a-f]{{{2 * KEY_BYTES}}}")
        self._lock = Lock()
        self._bytes, self._unlisted = 0, None if self.max_bytes is None else self.max_bytes  # the first write lists

    def get_many(self, keys: Sequence[bytes], most_bytes: int = MOST_BYTES) -> list[Buffer | None]:
        """See `Tier`. Raises what the store raises, and TimeoutError."""

        async def get(key: bytes) -> Buffer | None:
            try:
                found = await self.store.get_async(self._name(key))
                return b"" if found.meta["size"] > most_bytes else await _content(found, most_bytes)
            except FileNotFoundError:
                return None

        return self._at_once(get, keys)

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Tier`. Raises what the store raises, and TimeoutError."""

        async def contains(key: bytes) -> bool:
            try:
                await self.store.head_async(self._name(key))
            except FileNotFoundError:
                return False
            return True

        return self._at_once(contains, keys)

    def put_many(self, items: Sequence[tuple[bytes, Buffer]]) -> None:
        """See `Tier`. A value that is larger than `max_bytes` is not stored.

        Raises what the store raises, and TimeoutError; some of the values are stored then.
        """
        sizes = [memoryview(value).nbytes for _, value in items]
        kept = [(item, size) for item, size in zip(items, sizes, strict=True) if self._fits(size)]

        async def put(item: tuple[bytes, Buffer]) -> None:
            await self.store.put_async(self._name(item[0]), item[1])

        with self._turn():
            self._make_room(sum(size for _, size in kept))
            self._at_once(put, [item for item, _ in kept])

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Write alone where there is a limit: a listing does not have what other threads are about to store."""
        if self.max_bytes is None:
            yield
        elif not self._lock.acquire(timeout=min(self.timeout, TIMEOUT_MAX)):
            raise TimeoutError(f"timeout: expected to write within {self.timeout:g} s, got none")
        else:
            try:
                yield
            finally:
                self._lock.release()

    def _fits(self, size: int) -> bool:
        return self.max_bytes is None or size <= self.max_bytes

    def _make_room(self, size: int) -> None:
        """Count `size` bytes more; delete the oldest values if there are too many then."""
        if self.max_bytes is None or self._unlisted is None:
            return
        self._bytes += size
        self._unlisted += size
        if self._bytes <= self.max_bytes and self._unlisted <= self.max_bytes // _SHARE:
            return
        (there,) = self._at_once(self._listed, [self.prefix or None])
        there = sorted((each for each in there if self._own.fullmatch(each["path"])), key=_age)
        self._bytes, self._unlisted = size + sum(each["size"] for each in there), 0
        gone = []
        for each in there:
            if self._bytes <= self.max_bytes:
                break
            self._bytes -= each["size"]
            gone.append(each["path"])
        self._at_once(self._delete, [gone[i : i + _DELETED] for i in range(0, len(gone), _DELETED)])

    async def _listed(self, prefix: str | None) -> list[Any]:
        return [each async for batch in self.store.list(prefix) for each in batch]

    async def _delete(self, paths: list[str]) -> None:
        try:
            await self.store.delete_async(paths)
        except FileNotFoundError:  # another machine was faster
            if len(paths) > 1:
                for path in paths:
                    await self._delete([path])

    def _at_once(self, request: Callable[[Item], Awaitable[Found]], items: Sequence[Item]) -> list[Found]:
        """The results of a request for each item; the first error of one of them ends the others."""

        async def run() -> list[Found]:
            places = asyncio.Semaphore(self.concurrency)

            async def one(item: Item) -> Found:
                async with places:
                    return await request(item)

            try:
                return await asyncio.wait_for(asyncio.gather(*map(one, items)), self.timeout)
            except asyncio.TimeoutError:  # another class than TimeoutError before Python 3.11
                raise TimeoutError(f"timeout: expected answers within {self.timeout:g} s, got fewer") from None

        return asyncio.run(run()) if items else []

    def _name(self, key: bytes) -> str:
        return self.prefix + key.hex()

    __reduce_ex__ = refuse_copies("make another one over the same store")

    def __repr__(self) -> str:
        return f"ObjectStoreTier({type(self.store).__name__}, prefix={self.prefix!r}, max_bytes={self.max_bytes})"


async def _content(found: Any, most_bytes: int) -> Buffer:
    """The bytes of an object; none if there are more than `most_bytes`, whatever its headers say."""
    value = bytearray()
    async for chunk in found.stream():
        value += memoryview(chunk)
        if len(value) > most_bytes:
            return b""
    return value


def _age(found: Any) -> Any:
    return found["last_modified"], found["path"]
