"""The plane: creates every other handle."""

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

from fastness.encryption import AgentKey
from fastness.handles.activity import AsyncActivity
from fastness.handles.agents import AsyncAgents
from fastness.handles.atomic import AsyncAtomic
from fastness.handles.audit import AsyncAudit
from fastness.handles.backups import AsyncBackups
from fastness.handles.blobs import AsyncBlobs
from fastness.handles.collections import AsyncCollection
from fastness.handles.effects import AsyncEffects
from fastness.handles.encryption import AsyncEncryption
from fastness.handles.entities import AsyncEntities
from fastness.handles.hosting import AsyncHosting
from fastness.handles.ingress import AsyncIngress
from fastness.handles.leases import AsyncLeaseKey
from fastness.handles.locks import AsyncLocks
from fastness.handles.mailboxes import AsyncMailbox
from fastness.handles.pairs import AsyncPairs
from fastness.handles.queues import AsyncQueue
from fastness.handles.quotas import AsyncQuotas
from fastness.handles.runs import AsyncWorkflows
from fastness.handles.states import AsyncState
from fastness.handles.timers import AsyncTimers
from fastness.handles.tokens import AsyncTokens
from fastness.handles.within import AsyncWithin
from fastness.handles.worlds import AsyncWorld
from fastness.names import UNIVERSE, checked_name
from fastness.tiers import Tier
from fastness.wire import AsyncTransport
from fastness.wire.collections import ListCollections
from fastness.wire.leases import Leases, ListLeases, ListWaits, Waits
from fastness.wire.mail import GetMailPolicy, ListMailboxes, MailboxSize, MailPolicy, SetMailPolicy
from fastness.wire.nodes import ListNodes, Nodes
from fastness.wire.planes import MarkRestored, PlaneStatus, RaiseFormat, ShowPlane
from fastness.wire.queues import ListQueues, QueueSurvey, SurveyQueues
from fastness.wire.space import Collected, CollectGarbage, ShowSpace, ShowStorage, SpaceReport, StorageStatus
from fastness.wire.universes import ListUniverses
from fastness.wire.worlds import ListWorlds, SurveyWorlds, WorldSurvey

Result = TypeVar("Result")


class AsyncPlane:
    """An open plane. Close it, or use it as a context manager."""

    def __init__(self, transport: AsyncTransport, universe: str = UNIVERSE) -> None:
        self._transport = transport
        self.universe = checked_name("universe", universe)
        self.pairs = AsyncPairs(transport)
        self.blobs = AsyncBlobs(transport, self.universe)
        self.entities = AsyncEntities(transport, self.universe)
        self.locks = AsyncLocks(transport, self.universe)
        self.ingress = AsyncIngress(transport, self.universe)
        self.activity = AsyncActivity(transport, self.universe)
        self.tokens = AsyncTokens(transport)
        self.audit = AsyncAudit(transport, self.universe)
        self.quotas = AsyncQuotas(transport, self.universe)
        self.backups = AsyncBackups(transport)
        self.encryption = AsyncEncryption(transport)
        self.agents = AsyncAgents(transport, self.universe)
        self.workflows = AsyncWorkflows(transport, self.universe)
        self.hosting = AsyncHosting(transport, self.universe)
        self.effects = AsyncEffects(transport, self.universe)
        self.timers = AsyncTimers(transport, self.universe)

    async def universes(self, *, after: str = "", limit: int = 100) -> list[str]:
        """At most `limit` names of universes that contain data, in order, starting after `after`."""
        return (await self._transport.call(ListUniverses(after, limit))).names

    def world(self, name: str, *, incarnation: int | None = None) -> AsyncWorld:
        """The world of that name. Call `create` before its first use.

        With `incarnation`, as `describe` returns it, only that one: calls raise WorldNotFound if the world was deleted
        and created again since.
        """
        return AsyncWorld(self._transport, self.universe, name, incarnation=incarnation)

    async def worlds(self, *, after: str = "", limit: int = 100) -> list[str]:
        """At most `limit` names of worlds, in order, starting after `after`."""
        return (await self._transport.call(ListWorlds(after, limit, self.universe))).names

    async def survey_worlds(self, *, after: str = "", limit: int = 100) -> WorldSurvey:
        """The state and heights of each world; `next` is where the next page starts, if there is one."""
        return await self._transport.call(SurveyWorlds(after, limit, self.universe))

    def queue(self, name: str) -> AsyncQueue:
        """The queue of that name."""
        return AsyncQueue(self._transport, self.universe, name)

    async def queues(self, *, after: str = "", limit: int = 100) -> list[str]:
        """At most `limit` names of queues, in order, starting after `after`."""
        return (await self._transport.call(ListQueues(after, limit, self.universe))).names

    async def survey_queues(self, *, after: str = "", limit: int = 100, text: str = "") -> QueueSurvey:
        """The statistics of each queue whose name contains `text`; `next` is where the next page starts, if any.

        A page of a search may be empty and have a `next`: each call looks at a bounded number of names.
        """
        return await self._transport.call(SurveyQueues(after, limit, self.universe, text))

    def mailbox(
        self,
        agent: str,
        *,
        key: AgentKey | None = None,
        contacts: Mapping[str, bytes] | None = None,
        require_sealed: bool = False,
    ) -> AsyncMailbox:
        """The mailbox of an agent: `agent-7`, or `agent-7@universe`.

        Args:
            key: encrypts and decrypts mail end to end.
            contacts: the public keys of other agents; without it the registered keys are trusted.
            require_sealed: mail that its sender has not sealed has a `seal_error`, and `unseal` refuses it.
        """
        return AsyncMailbox(
            self._transport, self.universe, agent, key=key, contacts=contacts, require_sealed=require_sealed
        )

    async def mailboxes(self, *, after: str = "", limit: int = 100) -> list[MailboxSize]:
        """At most `limit` mailboxes with their numbers of mails that can be read, in the order of their names."""
        return (await self._transport.call(ListMailboxes(after, limit, self.universe))).mailboxes

    async def mail_policy(self) -> MailPolicy:
        """How many mails a mailbox holds, and for how long."""
        return await self._transport.call(GetMailPolicy(self.universe))

    async def set_mail_policy(self, policy: MailPolicy) -> MailPolicy:
        """Set the policy for mail that is sent from now on."""
        return await self._transport.call(SetMailPolicy(policy, self.universe))

    def atomic(self) -> AsyncAtomic:
        """A list of operations on queues, mail, worlds, states, entities, collections and leases that
        commits as one."""
        return AsyncAtomic(self._transport, self.universe)

    def within(self, connection: object) -> AsyncWithin:
        """Handles that write in the open transaction of your own connection to the plane's PostgreSQL database.

        What they write becomes visible with your commit, together with your own rows, and vanishes with your rollback.

        Args:
            connection: a connection of psycopg, or a session or connection of SQLAlchemy on psycopg. Of the same kind
                as the plane: for threads, or for an event loop.

        Raises:
            NotEmbedded: the plane is in another process; open it with its PostgreSQL URL.
            Unsupported: the plane is not on PostgreSQL.
        """
        return AsyncWithin(self._transport.within(connection), self.universe)

    def lease(self, key: str) -> AsyncLeaseKey:
        """The lease of that key, as in `orders/1234`."""
        return AsyncLeaseKey(self._transport, self.universe, key)

    async def leases(self, *, after: str = "", limit: int = 100) -> Leases:
        """The leases that are held now; `next` is where the next page starts, if there is one."""
        return await self._transport.call(ListLeases(after, limit, self.universe))

    async def waits(self, *, limit: int = 100) -> Waits:
        """Callers that wait for leases and locks in the plane's process."""
        return await self._transport.call(ListWaits(limit, self.universe))

    def state(self, key: str) -> AsyncState:
        """The state document of that key."""
        return AsyncState(self._transport, self.universe, key)

    def collection(self, name: str) -> AsyncCollection:
        """The collection of rows of that name."""
        return AsyncCollection(self._transport, self.universe, name)

    async def collections(self, *, after: str = "", limit: int = 100) -> list[str]:
        """At most `limit` names of collections that have rows, in order, starting after `after`."""
        return (await self._transport.call(ListCollections(after, limit, self.universe))).names

    async def gc(self, *, dry_run: bool = False, grace_seconds: float | None = None) -> Collected:
        """Delete blobs that no data has named for the grace period, in all universes; what was deleted.

        A server does this by itself every hour. A blob goes in two steps, each after the grace period: first its
        record, then its body in the object store, which a reader or a backup may still need.

        Args:
            dry_run: only say what would be deleted now.
            grace_seconds: the grace period; that of the plane by default.
        """
        return await self._transport.call(CollectGarbage(dry_run, grace_seconds))

    async def space(self) -> SpaceReport:
        """What is kept in all universes: how much it takes, why, and until when. Reads the whole key space."""
        return await self._transport.call(ShowSpace())

    async def storage_status(self) -> StorageStatus:
        """Whether the key space works, how full its disk is, and how the last collection went. Reads no stored data."""
        return await self._transport.call(ShowStorage())

    async def status(self) -> PlaneStatus:
        """The version that serves the plane, its id, and the lineage of its data."""
        return await self._transport.call(ShowPlane())

    async def nodes(self) -> Nodes:
        """The processes that have the plane open: servers, and programs that opened it on PostgreSQL."""
        return await self._transport.call(ListNodes())

    async def raise_format(self) -> PlaneStatus:
        """Raise the data format to the newest one of this version. Nodes of older versions cannot open the plane then.

        Raises:
            PlaneInUse: a process that does not know the format has the plane open; upgrade or stop it.
            NotEmbedded: the plane is in another process; open its data with this version.
        """
        return await self._transport.call(RaiseFormat())

    async def mark_restored(self, *, until_ms: int | None = None) -> PlaneStatus:
        """Begin another lineage, after the data was restored or copied by other tools than Fastness's.

        Args:
            until_ms: the time of the copy; now by default.

        Raises:
            NotEmbedded: the plane is in another process; stop it, and open its data.
        """
        return await self._transport.call(MarkRestored(until_ms))

    async def transact(
        self, work: Callable[..., Result], /, *args: Any, tier: Tier = Tier.CRITICAL, **kwargs: Any
    ) -> Result:
        """Run `work(tx, *args, **kwargs)` as one commit across all layers and return its result.

        `work` is a plain function that touches nothing but `tx`. It may run more than once, and on another thread.
        If it raises, nothing was written.

        Raises:
            NotEmbedded: the plane is in another process; use `atomic` there.
            NestedTransaction: called from inside a transaction of this plane.
        """
        return await self._transport.transact(work, *args, tier=tier, **kwargs)

    async def reopen(self) -> None:
        """Open the key space again after a failure, such as a full disk. Does nothing if it works.

        Acknowledged writes are intact. Handles, watches and leases stay valid.

        Raises:
            DiskFull, PathUnusable, DamagedDatabase, DatabaseFailed: it cannot be opened yet; try again later.
            NotEmbedded: the plane is in another process, which reopens it by itself.
        """
        await self._transport.reopen()

    async def close(self) -> None:
        """Make everything durable and close the plane. Closing twice is fine."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
