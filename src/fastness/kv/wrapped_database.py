"""A key space that passes its calls on to another one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastness.kv.contract import Database, Result, Work
from fastness.kv.watches import OnCommit, Watch
from fastness.tiers import Tier


class WrappedDatabase(Database):
    """The base of key spaces that change some of the calls of another one."""

    def __init__(self, inner: Database) -> None:
        self._inner = inner

    def transact(
        self, work: Work[Result], /, *args: Any, tier: Tier = Tier.CRITICAL, may_lose: bool = False, **kwargs: Any
    ) -> Result:
        return self._inner.transact(work, *args, tier=tier, may_lose=may_lose, **kwargs)

    async def transact_async(
        self, work: Work[Result], /, *args: Any, tier: Tier = Tier.CRITICAL, may_lose: bool = False, **kwargs: Any
    ) -> Result:
        return await self._inner.transact_async(work, *args, tier=tier, may_lose=may_lose, **kwargs)

    def read(self, work: Work[Result], /, *args: Any, tier: Tier = Tier.CRITICAL, **kwargs: Any) -> Result:
        return self._inner.read(work, *args, tier=tier, **kwargs)

    async def read_async(self, work: Work[Result], /, *args: Any, tier: Tier = Tier.CRITICAL, **kwargs: Any) -> Result:
        return await self._inner.read_async(work, *args, tier=tier, **kwargs)

    def size_of(self, begin: bytes, end: bytes, *, pairs_max: int | None = None) -> int | None:
        return self._inner.size_of(begin, end, pairs_max=pairs_max)

    def watch(self, prefix: bytes, *others: bytes, additions: bool = False) -> Watch:
        return self._inner.watch(prefix, *others, additions=additions)

    def subscribe(self, on_commit: OnCommit) -> Callable[[], None]:
        return self._inner.subscribe(on_commit)

    def sync(self) -> None:
        self._inner.sync()

    def checkpoint(self, path: Path) -> None:
        self._inner.checkpoint(path)

    def close(self) -> None:
        self._inner.close()
