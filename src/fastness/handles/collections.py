"""Collections: rows in the order of their keys, in partitions."""

from collections.abc import Iterable

from fastness.handles.arguments import checked_items
from fastness.names import checked_name
from fastness.tiers import Tier
from fastness.wire import AsyncTransport
from fastness.wire.collections import (
    ChangedRows,
    CommitRows,
    GetRows,
    KnownRow,
    ListPartitions,
    PartitionPage,
    Row,
    RowChange,
    RowKey,
    RowPage,
    ScanRows,
    WaitForRows,
)


class AsyncCollection:
    """A collection of rows.

    A row is found by its partition, which is any text of 1 to 1,024 bytes, and its key, a tuple of 1 to 8 texts or
    integers. Rows of a partition are in the order of their keys: texts by their UTF-8 bytes, integers by their value,
    and texts before integers.
    """

    def __init__(self, transport: AsyncTransport, universe: str, name: str) -> None:
        self.name = checked_name("collection", name)
        self._transport = transport
        self._universe = universe

    async def commit(self, changes: Iterable[RowChange], *, tier: Tier = Tier.CRITICAL) -> list[int | None]:
        """Apply up to 256 changes in their order, all or none; the version of each row that was put.

        It is that of the row that stays with `keep_existing`, and None for deletions.

        Raises:
            VersionConflict: a row does not have the version that a change requires; nothing was written.
        """
        found = list(checked_items(changes, "wrap it in a list: commit([change])"))
        return (await self._transport.call(CommitRows(self.name, found, self._universe, tier=tier))).versions

    async def get(self, partition: str, key: RowKey, *, tier: Tier = Tier.CRITICAL) -> Row | None:
        """The row, or None."""
        return (await self._transport.call(GetRows(self.name, partition, [key], self._universe, tier=tier))).rows[0]

    async def get_many(self, partition: str, keys: Iterable[RowKey], *, tier: Tier = Tier.CRITICAL) -> list[Row | None]:
        """The row of each key, or None, of up to 1,000 keys."""
        found = list(checked_items(keys, "wrap it in a list: get_many(partition, [key])"))
        return (await self._transport.call(GetRows(self.name, partition, found, self._universe, tier=tier))).rows

    async def scan(
        self,
        partition: str,
        prefix: RowKey = (),
        *,
        after: RowKey | None = None,
        before: RowKey | None = None,
        limit: int = 1_000,
        reverse: bool = False,
        tier: Tier = Tier.CRITICAL,
    ) -> RowPage:
        """A page of at most `limit` rows whose keys start with `prefix`, in order.

        A page ends earlier when its values have 4 MiB. `next` is the key to pass as `after` for the next page, or as
        `before` in reverse; it is None at the end.

        Args:
            after: only rows with higher keys.
            before: only rows with lower keys.
            reverse: the last rows, backwards.
        """
        request = ScanRows(self.name, partition, prefix, after, before, limit, reverse, self._universe, tier=tier)
        return await self._transport.call(request)

    async def wait(
        self, rows: Iterable[KnownRow], *, wait_seconds: float = 0.0, tier: Tier = Tier.CRITICAL
    ) -> ChangedRows:
        """Those of up to 1,000 rows that have another version than the one you know, as soon as there is one.

        None after `wait_seconds`. A row that is deleted and written again begins with version 1, as before.
        """
        found = list(checked_items(rows, "wrap it in a list: wait([KnownRow(partition, key, version)])"))
        return await self._transport.call(WaitForRows(self.name, found, wait_seconds, self._universe, tier=tier))

    async def partitions(self, prefix: str = "", *, after: str = "", limit: int = 100) -> PartitionPage:
        """Partitions that have rows and start with `prefix`, in order, starting after `after`.

        A partition whose rows have all expired may still be listed for about an hour.
        """
        return await self._transport.call(ListPartitions(self.name, prefix, after, limit, self._universe))
