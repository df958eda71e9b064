"""Sessions of the OpenAI Agents SDK: the history of a conversation, in a collection of a plane.

    session = FastnessSession(plane, "user-7")
    result = await Runner.run(agent, "Hello", session=session)

The rows of a session are the partition with its id, in the collection "openai-agents":

    ("i", number)    a JSON list of items: one item, or several if a call adds more than 255 items
    ("n",)           the number of the next row

Every write puts the row ("n",) under the version that it has read. So writers in several processes do not overwrite
each other, and the items of one call stay together.
"""

import json
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from fastness import AsyncPlane, DeleteRow, DeleteRows, Plane, PutRow, Row
from fastness.errors import InvalidArgument
from fastness.extras import how_to_install
from fastness.limits import SESSION_CLEARED_SECONDS, SESSION_COMMIT_ROWS_MAX
from fastness.plane_access import Change, decoded
from fastness.session_rows import SessionRows, write

try:
    from agents.memory import SessionSettings
except ImportError as error:
    message = f"The OpenAI Agents SDK is not installed; {how_to_install('openai-agents')}"
    raise ImportError(message) from error

if TYPE_CHECKING:
    from agents import TResponseInputItem

_ITEMS: Final = ("i",)
_COUNT: Final = ("n",)
_decode_items: Final[Callable[[bytes], Any]] = partial(
    decoded, "Stored items", msgspec.json.Decoder(list[dict[str, Any]]).decode
)
_decode_count: Final = partial(decoded, "The count of a session's items", int)


class FastnessSession:
    """The history of one conversation: a `Session` of the OpenAI Agents SDK.

    Takes a Plane or an AsyncPlane, embedded or remote. Objects with the same plane and session id share the history,
    also in other processes. `session_settings` has the limit of `get_items` calls that give none.
    """

    session_settings: SessionSettings | None

    def __init__(
        self,
        plane: Plane | AsyncPlane,
        session_id: str,
        *,
        collection: str = "openai-agents",
        session_settings: SessionSettings | None = None,
    ) -> None:
        self.session_id = session_id
        self.session_settings = session_settings or SessionSettings()
        self._rows = SessionRows(plane, collection)

    async def get_items(self, limit: int | None = None) -> "list[TResponseInputItem]":
        """The items of the conversation, oldest first; with a limit, the latest ones."""
        if limit is None and self.session_settings is not None:
            limit = self.session_settings.limit
        if limit is not None and limit < 0:  # As the sessions of the SDK do.
            limit = None
        items: list[TResponseInputItem] = []
        async with aclosing(self._rows.scan(self.session_id, _ITEMS, limit=limit, reverse=True)) as rows:
            async for row in rows:
                items += reversed(await self._load(row))
                if limit is not None and len(items) >= limit:
                    break
        return items[:limit][::-1]

    async def add_items(self, items: "list[TResponseInputItem]") -> None:
        """Add items at the end, all in one commit. Other writers add theirs before or after them.

        Raises:
            InvalidArgument: an item is not a dict of values that JSON has; nothing was added.
        """
        if not items:
            return
        for item in items:
            if not isinstance(item, dict):
                raise InvalidArgument(f"an item is a {type(item).__name__}; give a list of dicts")
        a_row = -(-len(items) // SESSION_COMMIT_ROWS_MAX)
        parts = [items[start : start + a_row] for start in range(0, len(items), a_row)]
        values = await self._rows.store([_encode(part) for part in parts])

        async def add() -> None:
            version, number = await self._count()
            puts = [PutRow(self.session_id, ("i", number + place), value) for place, value in enumerate(values)]
            await self._rows.commit([self._counted(number + len(values), version), *puts])

        await write(add)

    async def pop_item(self) -> "TResponseInputItem | None":
        """Remove and return the latest item; None if there is none."""

        async def pop() -> "TResponseInputItem | None":
            version, number = await self._count()
            last = [row async for row in self._rows.scan(self.session_id, _ITEMS, limit=1, reverse=True)]
            if not last:
                return None
            *others, item = await self._load(last[0])
            removal: Change = DeleteRow(self.session_id, last[0].key)
            if others:
                [value] = await self._rows.store([_encode(others)])
                removal = PutRow(self.session_id, last[0].key, value)
            await self._rows.commit([self._counted(number, version), removal])
            return item

        return await write(pop)

    async def clear_session(self) -> None:
        """Remove all items."""

        async def clear() -> None:
            version, number = await self._count()
            if version == 0:
                return
            # The count stays for a while: if it began again at once, a writer that has read the old one could
            # overwrite new items.
            count = self._counted(number, version, ttl_seconds=SESSION_CLEARED_SECONDS)
            await self._rows.commit([count, DeleteRows(self.session_id, _ITEMS)])

        await write(clear)

    async def _count(self) -> tuple[int, int]:
        """The version of the count, 0 if there is none, and the number of the next row."""
        [row] = await self._rows.get_many(self.session_id, [_COUNT])
        return (0, 0) if row is None else (row.version, _decode_count(row.value))

    def _counted(self, number: int, version: int, *, ttl_seconds: float | None = None) -> PutRow:
        return PutRow(self.session_id, _COUNT, str(number).encode(), if_version=version, ttl_seconds=ttl_seconds)

    async def _load(self, row: Row) -> "list[TResponseInputItem]":
        items: list[TResponseInputItem] = _decode_items(await self._rows.load(row))
        return items


def _encode(items: "list[TResponseInputItem]") -> bytes:
    try:
        return json.dumps(items, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"an item cannot be stored as JSON ({error}); convert its values first") from error
