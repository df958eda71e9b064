"""Generated from handles/plane.py by tools/make_twins.py; change that file instead."""

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

from fastness.encryption import AgentKey
from fastness.handles.sync.activity import Activity
from fastness.handles.sync.agents import Agents
from fastness.handles.sync.atomic import Atomic
from fastness.handles.sync.audit import Audit
from fastness.handles.sync.backups import Backups
from fastness.handles.sync.blobs import Blobs
from fastness.handles.sync.collections import Collection
from fastness.handles.sync.effects import Effects
from fastness.handles.sync.encryption import Encryption
from fastness.handles.sync.entities import Entities
from fastness.handles.sync.hosting import Hosting
from fastness.handles.sync.ingress import Ingress
from fastness.handles.sync.leases import LeaseKey
from fastness.handles.sync.locks import Locks
from fastness.handles.sync.mailboxes import Mailbox
from fastness.handles.sync.pairs import Pairs
from fastness.handles.sync.queues import Queue
from fastness.handles.sync.quotas import Quotas
from fastness.handles.sync.runs import Workflows
from fastness.handles.sync.states import State
from fastness.handles.sync.timers import Timers
from fastness.handles.sync.tokens import Tokens
from fastness.handles.sync.within import Within
from fastness.handles.sync.worlds import World
from fastness.names import UNIVERSE, checked_name
from fastness.tiers import Tier
from fastness.wire import Transport
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


class Plane:
    """An open plane. Close it, or use it as a context manager."""

    def __init__(self, transport: Transport, universe: str = UNIVERSE) -> None:
        self._transport = transport
        self.universe = checked_name("universe", universe)
        self.pairs = Pairs(transport)
        self.blobs = Blobs(transport, self.universe)
        self.entities = Entities(transport, self.universe)
        self.locks = Locks(transport, self.universe)
        self.ingress = Ingress(transport, self.universe)
        self.activity = Activity(transport, self.universe)
        self.tokens = Tokens(transport)
        self.audit = Audit(transport, self.universe)
        self.quotas = Quotas(transport, self.universe)
        self.backups = Backups(transport)
        self.encryption = Encryption(transport)
        self.agents = Agents(transport, self.universe)
        self.workflows = Workflows(transport, self.universe)
        self.hosting = Hosting(transport, self.universe)
        self.effects = Effects(transport, self.universe)
        self.timers = Timers(transport, self.universe)

    def universes(self, *, after: str = "", limit: int = 100) -> list[str]:
        """At most `limit` names of universes that contain data, in order, starting after `after`."""
        return (self._transport.call(ListUniverses(after, limit))).names

    def world(self, name: str, *, incarnation: int | None = None) -> World:
        """The world of that name. Call `create` before its first use.

        With `incarnation`, as `describe` returns it, only that one: calls raise WorldNotFound if the world was deleted
        and created again since.
        """
        return World(self._transport, self.universe, name, incarnation=incarnation)

    def worlds(self, *, after: str = "", limit: int = 100) -> list[str]:
        """At most `limit` names of worlds, in order, starting after `after`."""
        return (self._transport.call(ListWorlds(after, limit, self.universe))).names

    def survey_worlds(self, *, after: str = "", limit: int = 100) -> WorldSurvey:
        """The state and heights of each world; `next` is where the next page starts, if there is one."""
        return self._transport.call(SurveyWorlds(after, limit, self.universe))

    def queue(self, name: str) -> Queue:
        """The queue of that name."""
        return Queue(self._transport, self.universe, name)

    def queues(self, *, after: str = "", limit: int = 100) -> list[str]:
        """At most `limit` names of queues, in order, starting after `after`."""
        return (self._transport.call(ListQueues(after, limit, self.universe))).names

    def survey_queues(self, *, after: str = "", limit: int = 100, text: str = "") -> QueueSurvey:
        """The statistics of each queue whose name contains `text`; `next` is where the next page starts, if any.

        A page of a search may be empty and have a `next`: each call looks at a bounded number of names.
        """
        return self._transport.call(SurveyQueues(after, limit, self.universe, text))

    def mailbox(
        self,
        agent: str,
        *,
        key: AgentKey | None = None,
        contacts: Mapping[str, bytes] | None = None,
        require_sealed: bool = False,
    ) -> Mailbox:
        """The mailbox of an agent: `agent-7`, or `agent-7@universe`.

        Args:
            key: encrypts and decrypts mail end to end.
            contacts: the public keys of other agents; without it the registered keys are trusted.
            require_sealed: mail that its sender has not sealed has a `seal_error`, and `unseal` refuses it.
        """
        return Mailbox(self._transport, self.universe, agent, key=key, contacts=contacts, require_sealed=require_sealed)

    def mailboxes(self, *, after: str = "", limit: int = 100) -> list[MailboxSize]:
        """At most `limit` mailboxes with their numbers of mails that can be read, in the order of their names."""
        return (self._transport.call(ListMailboxes(after, limit, self.universe))).mailboxes

    def mail_policy(self) -> MailPolicy:
        """How many mails a mailbox holds, and for how long."""
        return self._transport.call(GetMailPolicy(self.universe))

    def set_mail_policy(self, policy: MailPolicy) -> MailPolicy:
        """Set the policy for mail that is sent from now on."""
        return self._transport.call(SetMailPolicy(policy, self.universe))

    def atomic(self) -> Atomic:
        """A list of operations on queues, mail, worlds, states, entities, collections and leases that
        commits as one."""
        return Atomic(self._transport, self.universe)

    def within(self, connection: object) -> Within:
        """Handles that write in the open transaction of your own connection to the plane's PostgreSQL database.

        What they write becomes visible with your commit, together with your own rows, and vanishes with your rollback.

        Args:
            connection: a connection of psycopg, or a session or connection of SQLAlchemy on psycopg. Of the same kind
                as the plane: for threads, or for an event loop.

        Raises:
            NotEmbedded: the plane is in another process; open it with its PostgreSQL URL.
            Unsupported: the plane is not on PostgreSQL.
        """
        return Within(self._transport.within(connection), self.universe)

    def lease(self, key: str) -> LeaseKey:
        """The lease of that key, as in `orders/1234`."""
        return LeaseKey(self._transport, self.universe, key)

    def leases(self, *, after: str = "", limit: int = 100) -> Leases:
        """The leases that are held now; `next` is where the next page starts, if there is one."""
        return self._transport.call(ListLeases(after, limit, self.universe))

    def waits(self, *, limit: int = 100) -> Waits:
        """Callers that wait for leases and locks in the plane's process."""
        return self._transport.call(ListWaits(limit, self.universe))

    def state(self, key: str) -> State:
        """The state document of that key."""
        return State(self._transport, self.universe, key)

    def collection(self, name: str) -> Collection:
        """The collection of rows of that name."""
        return Collection(self._transport, self.universe, name)

    def collections(self, *, after: str = "", limit: int = 100) -> list[str]:
        """At most `limit` names of collections that have rows, in order, starting after `after`."""
        return (self._transport.call(ListCollections(after, limit, self.universe))).names

    def gc(self, *, dry_run: bool = False, grace_seconds: float | None = None) -> Collected:
        """Delete blobs that no data has named for the grace period, in all universes; what was deleted.

        A server does this by itself every hour. A blob goes in two steps, each after the grace period: first its
        record, then its body in the object store, which a reader or a backup may still need.

        Args:
            dry_run: only say what would be deleted now.
            grace_seconds: the grace period; that of the plane by default.
        """
        return self._transport.call(CollectGarbage(dry_run, grace_seconds))

    def space(self) -> SpaceReport:
        """What is kept in all universes: how much it takes, why, and until when. Reads the whole key space."""
        return self._transport.call(ShowSpace())

    def storage_status(self) -> StorageStatus:
        """Whether the key space works, how full its disk is, and how the last collection went. Reads no stored data."""
        return self._transport.call(ShowStorage())

    def status(self) -> PlaneStatus:
        """The version that serves the plane, its id, and the lineage of its data."""
        return self._transport.call(ShowPlane())

    def nodes(self) -> Nodes:
        """The processes that have the plane open: servers, and programs that opened it on PostgreSQL."""
        return self._transport.call(ListNodes())

    def raise_format(self) -> PlaneStatus:
        """Raise the data format to the newest one of this version. Nodes of older versions cannot open the plane then.

        Raises:
            PlaneInUse: a process that does not know the format has the plane open; upgrade or stop it.
            NotEmbedded: the plane is in another process; open its data with this version.
        """
        return self._transport.call(RaiseFormat())

    def mark_restored(self, *, until_ms: int | None = None) -> PlaneStatus:
        """Begin another lineage, after the data was restored or copied by other tools than Fastness's.

        Args:
            until_ms: the time of the copy; now by default.

        Raises:
            NotEmbedded: the plane is in another process; stop it, and open its data.
        """
        return self._transport.call(MarkRestored(until_ms))

    def transact(self, work: Callable[..., Result], /, *args: Any, tier: Tier = Tier.CRITICAL, **kwargs: Any) -> Result:
        """Run `work(tx, *args, **kwargs)` as one commit across all layers and return its result.

        `work` is a plain function that touches nothing but `tx`. It may run more than once, and on another thread.
        If it raises, nothing was written.

        Raises:
            NotEmbedded: the plane is in another process; use `atomic` there.
            NestedTransaction: called from inside a transaction of this plane.
        """
        return self._transport.transact(work, *args, tier=tier, **kwargs)

    def reopen(self) -> None:
        """Open the key space again after a failure, such as a full disk. Does nothing if it works.

        Acknowledged writes are intact. Handles, watches and leases stay valid.

        Raises:
            DiskFull, PathUnusable, DamagedDatabase, DatabaseFailed: it cannot be opened yet; try again later.
            NotEmbedded: the plane is in another process, which reopens it by itself.
        """
        self._transport.reopen()

    def close(self) -> None:
        """Make everything durable and close the plane. Closing twice is fine."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
