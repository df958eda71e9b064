"""Hosting: worlds that have a program, and the hosts that run it.

A host claims worlds that have work. A claim is a lease with a fence: only its holder commits turns of the world. A turn
is one commit: inbox items that were handled move to the journal, with the records and everything else of the turn.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from fastness import limits
from fastness.limits import HOST_LEASE_SECONDS
from fastness.names import UNIVERSE
from fastness.wire.canonical import check_canonical
from fastness.wire.fields import (
    Count,
    DelaySeconds,
    Hash,
    Limit,
    Name,
    NameOrAll,
    Owner,
    batch_of,
)
from fastness.wire.inboxes import Effect, InboxItem, Timer
from fastness.wire.requests import Committed, Operation, Request, Route


class ClaimedWorld(msgspec.Struct, frozen=True):
    """A world that has work, leased by the caller: the inbox items that come next, and where its journal ends.

    `is_new` is false for a world that the caller held already, whose fence has not changed.
    """

    world: str
    program: str
    incarnation: int
    fence: int
    expires_ms: int
    head: int
    cursor: int | None
    items: list[tuple[int, InboxItem]] = msgspec.field(default_factory=list)
    is_new: bool = True
    attempts: int = 0  # How often the next turn has failed.


class ClaimedWorlds(msgspec.Struct, frozen=True):
    """Worlds that have work."""

    worlds: list[ClaimedWorld]


class AsideItem(msgspec.Struct, frozen=True):
    """An item that was set aside, because its program failed to handle it."""

    sequence: int
    item: InboxItem
    error: str  # With its traceback.
    set_aside_ms: int


class AsideItems(msgspec.Struct, frozen=True):
    """Items that were set aside, in order."""

    items: list[AsideItem]


class HostingInfo(msgspec.Struct, frozen=True):
    """How a world is run: its program, the host that holds it, and whether it is stopped by an error."""

    world: str
    program: str | None  # None: no host runs it.
    owner: str | None  # The host that holds it.
    fence: int
    expires_ms: int | None  # When the claim ends; None if no host holds it.
    ready_ms: int | None  # When a host may claim it; None if it has no work, or is held.
    attempts: int
    error: str | None  # Of the last failed turn.
    is_stopped: bool
    set_aside: int  # How many items are set aside.


def summary_of(error: str) -> str:
    """What a traceback ends with: the type of the error, without its modules, and its message."""
    kind, colon, message = error.rstrip().rpartition("\n")[2].partition(": ")
    return f"{kind.rpartition('.')[2]}{colon}{message}"


class GivenBack(msgspec.Struct, frozen=True):
    """A world that its host gives back, and what the host has seen of it."""

    world: Name
    fence: int
    head: int  # Of the journal. Records that the host has not seen are work for the next one.
    has_work: bool = False
    waits: bool = True  # Without work, it waits for more than its own timers.


class RenewedWorld(msgspec.Struct, frozen=True):
    """A world that its host still holds."""

    world: str
    fence: int
    expires_ms: int


class RenewedWorlds(msgspec.Struct, frozen=True):
    """The worlds whose claims were renewed."""

    worlds: list[RenewedWorld]


class TurnCommitted(msgspec.Struct, frozen=True):
    """Where the journal ends after a turn, when the claim ends, and whether more items follow those that it took.

    `has_more` is false for a turn that takes no items: it does not look for them.
    """

    head: int
    expires_ms: int
    has_more: bool


class SendPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which sends between universes a universe allows: names of universes, or `*`. By default it allows none.

    A send needs both: the universe of the sending world lists the other one in `sends_to`, and that one lists it in
    `accepts_from`.
    """

    sends_to: list[str] = []
    accepts_from: list[str] = []


class ClaimWorlds(Request[ClaimedWorlds], frozen=True, tag="hosting.claim"):
    """Worlds of the given programs that have work, the one that has waited longest first.

    These are worlds that no host holds, and worlds of the caller for which items arrived since they were returned last.
    The items of a world start after its cursor, so some of them may have been returned before. Waits up to
    `wait_seconds` for a world.
    """

    operation = Operation(
        repeatable="a world whose claim was not answered is claimed again when that claim ends",
        http=(Route("POST", "/v1/hosting/claim", "Claim worlds that have work."),),
    )

    programs: Annotated[list[Name], Meta(max_length=limits.HOST_PROGRAMS_MAX)]
    owner: Owner
    limit: Annotated[int, Meta(ge=1, le=limits.HOSTED_WORLDS_MAX)] = 16
    lease_seconds: Annotated[float, Meta(ge=0.001, le=limits.HOST_LEASE_SECONDS_MAX)] = HOST_LEASE_SECONDS
    wait_seconds: Annotated[float, Meta(ge=0, le=limits.HOST_WAIT_SECONDS_MAX)] = 0.0
    universe: Name = UNIVERSE


class CommitTurn(Request[TurnCommitted], frozen=True, tag="hosting.commit"):
    """Commit a turn of a claimed world: its records go to the end of the journal, in this order.

    `opening`, then the items after the cursor up to the sequence `take`, then `entries`. Items in `aside` (sequence,
    error) are set aside: the entry `{"aside": sequence}` takes the place of such an item. An effect or timer names the
    record that asks for it, counted from the first one of this turn. `blobs` are the hashes of blobs that the entries
    name: the turn is refused unless they are stored. The claim is renewed when half of it is over.
    """

    operation = Operation(
        stores=True,
        atomic=True,
        http=(Route("POST", "/v1/worlds/{world}/turns", "Commit a turn of a claimed world.", status=201),),
    )

    world: Name
    owner: Owner
    fence: int
    expected_head: Count
    take: Count | None = None
    opening: list[bytes] = msgspec.field(default_factory=list)
    entries: list[bytes] = msgspec.field(default_factory=list)
    effects: Annotated[list[tuple[int, Effect]], Meta(max_length=limits.TURN_REQUESTS_MAX)] = msgspec.field(
        default_factory=list
    )
    timers: Annotated[list[tuple[int, Timer]], Meta(max_length=limits.TURN_REQUESTS_MAX)] = msgspec.field(
        default_factory=list
    )
    cancelled_timers: Annotated[list[bytes], Meta(max_length=limits.TURN_REQUESTS_MAX)] = msgspec.field(
        default_factory=list
    )  # Their intent hashes.
    aside: list[tuple[int, str]] = msgspec.field(default_factory=list)
    lease_seconds: Annotated[float, Meta(ge=0.001, le=limits.HOST_LEASE_SECONDS_MAX)] = HOST_LEASE_SECONDS
    universe: Name = UNIVERSE
    blobs: Annotated[list[Hash], Meta(max_length=limits.TURN_REQUESTS_MAX)] = msgspec.field(default_factory=list)

    def check(self) -> None:
        for entry in (*self.opening, *self.entries):
            check_canonical(entry)


class SendToWorld(Request[Committed], frozen=True, tag="hosting.send"):
    """Send a domain event from a claimed world to a world of another universe, if both universes allow it.

    A host makes it part of the commit of a turn, so that it is sent exactly once. The event names its sender as
    `world@universe`, which the plane takes from the claim.

    The caller needs a token for `universe`, the one of the sending world, and not for `to_universe`: a host must not
    need access to all that another universe has. What it can do there is append such events to inboxes, and only while
    the policy of that universe accepts events of this one. The consent of the receiver is its policy, which only a
    token for that universe changes. All of this is checked in the transaction that sends.
    """

    operation = Operation(
        stores=True,
        atomic=True,
        http=(
            Route(
                "POST",
                "/v1/worlds/{world}/sends",
                "Send an event from a claimed world to a world of another universe.",
                status=201,
            ),
        ),
    )

    world: Name
    owner: Owner
    fence: int
    to: Name  # The receiving world.
    to_universe: Name
    schema: str
    payload: bytes = b""
    key: bytes | None = None
    universe: Name = UNIVERSE


class GetSendPolicy(Request[SendPolicy], frozen=True, tag="hosting.policy.get"):
    operation = Operation(
        reads=True,
        http=(Route("GET", "/v1/hosting/policy", "Read which sends between universes this universe allows."),),
    )

    universe: Name = UNIVERSE


class SetSendPolicy(Request[SendPolicy], frozen=True, tag="hosting.policy.set"):
    """Replace the lists of a universe's policy; one that is None stays as it is."""

    operation = Operation(
        audited=True,
        http=(Route("PUT", "/v1/hosting/policy", "Set which sends between universes this universe allows."),),
    )

    sends_to: Annotated[list[NameOrAll], Meta(max_length=limits.SEND_UNIVERSES_MAX)] | None = None
    accepts_from: Annotated[list[NameOrAll], Meta(max_length=limits.SEND_UNIVERSES_MAX)] | None = None
    universe: Name = UNIVERSE


class FailTurn(Request[Committed], frozen=True, tag="hosting.fail"):
    """Record that a turn failed, and give the world back: it has work again after the delay, or is stopped."""

    operation = Operation(http=(Route("POST", "/v1/worlds/{world}/turns/fail", "Record that a turn failed."),))

    world: Name
    owner: Owner
    fence: int
    error: str
    delay_seconds: DelaySeconds = 0.0
    is_stopped: bool = False
    universe: Name = UNIVERSE


class RenewWorlds(Request[RenewedWorlds], frozen=True, tag="hosting.renew"):
    """Renew the claims on worlds (name, fence); the answer has those that the caller still holds."""

    operation = Operation(
        repeatable="renewing a claim again only makes it longer",
        http=(Route("POST", "/v1/hosting/renew", "Renew the claims on worlds."),),
    )

    worlds: Annotated[list[tuple[Name, int]], batch_of(limits.HOSTED_WORLDS_MAX, "worlds")]
    owner: Owner
    lease_seconds: Annotated[float, Meta(ge=0.001, le=limits.HOST_LEASE_SECONDS_MAX)] = HOST_LEASE_SECONDS
    universe: Name = UNIVERSE


class ReleaseWorlds(Request[Committed], frozen=True, tag="hosting.release"):
    """Give worlds back; those that are lost already are skipped.

    A world has work for other hosts with `has_work`, if items are left in its inbox, or if its journal has records that
    the host has not seen. So a request that arrives late cannot end work that was begun after it was sent.
    """

    operation = Operation(
        repeatable="a world that was given back is not given back again",
        http=(Route("POST", "/v1/hosting/release", "Give claimed worlds back."),),
    )

    worlds: Annotated[list[GivenBack], batch_of(limits.HOSTED_WORLDS_MAX, "worlds")]
    owner: Owner
    universe: Name = UNIVERSE


class SetProgram(Request[HostingInfo], frozen=True, tag="hosting.set"):
    """Have a world run by the hosts that have this program; with None, by no host."""

    operation = Operation(
        audited=True,
        stores=True,
        atomic=True,
        http=(
            Route(
                "PUT",
                "/v1/worlds/{world}/program",
                "Set the program of a world.",
                read_only=tuple(name for name in HostingInfo.__struct_fields__ if name != "program"),
            ),
        ),
    )

    world: Name
    program: Name | None
    universe: Name = UNIVERSE


class DescribeHosting(Request[HostingInfo], frozen=True, tag="hosting.describe"):
    operation = Operation(
        reads=True, http=(Route("GET", "/v1/worlds/{world}/program", "Describe how a world is run."),)
    )

    world: Name
    universe: Name = UNIVERSE


class ResumeWorld(Request[HostingInfo], frozen=True, tag="hosting.resume"):
    """Let hosts run a world again that is stopped by an error."""

    operation = Operation(
        audited=True,
        http=(Route("POST", "/v1/worlds/{world}/program/resume", "Run a stopped world again."),),
    )

    world: Name
    universe: Name = UNIVERSE


class ListAside(Request[AsideItems], frozen=True, tag="hosting.aside.list"):
    operation = Operation(
        reads=True, http=(Route("GET", "/v1/worlds/{world}/aside", "List the items that were set aside."),)
    )

    world: Name
    after: int | None = None
    limit: Limit = 100
    universe: Name = UNIVERSE


class RetryAside(Request[Committed], frozen=True, tag="hosting.aside.retry"):
    """Put an item that was set aside back at the end of the inbox; with `drop`, remove it."""

    operation = Operation(
        audited=True,
        stores=True,
        http=(
            Route("POST", "/v1/worlds/{world}/aside/{sequence}/retry", "Handle an item again that was set aside."),
            Route(
                "DELETE",
                "/v1/worlds/{world}/aside/{sequence}",
                "Remove an item that was set aside.",
                fixed={"drop": True},
            ),
        ),
    )

    world: Name
    sequence: Count
    drop: bool = False
    universe: Name = UNIVERSE
