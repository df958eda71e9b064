"""The audit log: who did what, when and from where."""

from fastness.handles.handle import AsyncHandle
from fastness.wire.audit import AuditPage, ReadAudit


class AsyncAudit(AsyncHandle):
    """The audit log of a universe, and that of the plane itself."""

    async def read(
        self,
        *,
        since_ms: int | None = None,
        until_ms: int | None = None,
        actor: str = "",
        action: str = "",
        after: str = "",
        limit: int = 100,
    ) -> AuditPage:
        """At most `limit` entries of the universe, the newest first; `next` is where the next page starts.

        A page may be empty and have a `next`: each page reads a bounded number of entries.

        Args:
            since_ms: entries from this time on.
            until_ms: entries before this time.
            actor: of this token, by its name or id, or of this `user@host`.
            action: a verb such as `queue:purge`, or a beginning with a star, such as `queue:*`.
            after: the `next` of the page before.
        """
        return await self._transport.call(ReadAudit(self._universe, since_ms, until_ms, actor, action, after, limit))

    async def read_plane(
        self,
        *,
        since_ms: int | None = None,
        until_ms: int | None = None,
        actor: str = "",
        action: str = "",
        after: str = "",
        limit: int = 100,
    ) -> AuditPage:
        """`read` for the plane itself: tokens, backups, collections, and the calls that tokens were refused."""
        return await self._transport.call(ReadAudit(None, since_ms, until_ms, actor, action, after, limit))
