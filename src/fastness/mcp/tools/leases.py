"""Tools over leases: exclusive use of keys for a time, as the files that coding agents reserve."""

import asyncio
import time
from typing import Annotated, Any, Final

from msgspec import Meta

import fastness
from fastness.errors import Fenced, InvalidName, LeaseHeld
from fastness.limits import MCP_LEASE_KEYS_MAX, MCP_LEASE_SECONDS, MCP_LIST_MAX, NAME_BYTES_MAX
from fastness.mcp.caller import Caller
from fastness.mcp.tool import Tool, ToolInput, ToolOutput, utc
from fastness.mcp.tools.fields import AfterName, AtExpiry, ExpiresAt, Fence, LeaseId, LeaseSeconds, Next, WaitSeconds
from fastness.names import checked_key

Key = Annotated[
    str,
    Meta(
        description="Names joined by slashes, such as a path from the root of the repository: src/app.py.",
        min_length=1,
        max_length=NAME_BYTES_MAX,
    ),
]


class LeaseAcquire(ToolInput, frozen=True):
    keys: Annotated[
        list[Key],
        Meta(
            description="What you need for yourself; you get all of them or none.",
            min_length=1,
            max_length=MCP_LEASE_KEYS_MAX,
        ),
    ]
    lease_seconds: LeaseSeconds = MCP_LEASE_SECONDS
    wait_seconds: WaitSeconds = 0.0


class HeldLease(ToolOutput, frozen=True):
    key: Annotated[str, Meta(description="The key that is yours.")]
    lease_id: Annotated[str, Meta(description="For lease_keep, lease_release and state_set.")]
    fence: Annotated[int, Meta(description="For lease_keep, lease_release and state_set.")]
    expires_at: ExpiresAt


class HeldLeases(ToolOutput, frozen=True):
    leases: Annotated[list[HeldLease], Meta(description="One for each key.")]
    at_expiry: AtExpiry


async def _acquire(caller: Caller, given: LeaseAcquire) -> HeldLeases:
    ends_at = time.monotonic() + given.wait_seconds
    known = {key: await caller.plane.lease(_checked(key)).describe() for key in given.keys}
    mine = {key for key, found in known.items() if found.held and found.lease and found.lease.owner == caller.agent}
    granted: list[fastness.AsyncLease] = []
    # All callers take keys in one order, so that no two of them wait for each other. Keys that the caller holds come
    # last: if another one is refused, their fences stay valid. They are never released: if one has expired and is
    # refused, those that were granted again stay the caller's.
    for key in sorted(known, key=lambda each: (each in mine, each)):
        wait_seconds = max(ends_at - time.monotonic(), 0.0)
        try:
            lease = await caller.plane.lease(key).acquire(
                caller.agent, ttl_seconds=given.lease_seconds, wait_seconds=wait_seconds
            )
        except LeaseHeld as error:
            await _release(granted, mine)
            raise await _held_by_another(
                caller, key, error, [each.key for each in granted if each.key in mine]
            ) from None
        except (Exception, asyncio.CancelledError):
            await asyncio.shield(_release(granted, mine))
            raise
        granted.append(lease)
    leases = [HeldLease.of(lease, lease_id=lease.id) for lease in granted]
    return HeldLeases(leases=leases, at_expiry=_at_expiry(given.lease_seconds))


async def _release(leases: list[fastness.AsyncLease], kept: set[str]) -> None:
    for lease in leases:
        if lease.key not in kept:
            await lease.release()


async def _held_by_another(caller: Caller, key: str, error: LeaseHeld, kept: list[str]) -> LeaseHeld:
    """The error, with the owner, until when it holds the key, and what to do.

    Args:
        kept: the keys that the caller held before, and that have new fences.
    """
    held = (await caller.plane.lease(key).describe()).lease
    if held is None:
        return error
    now_ms = getattr(error, "now_ms", time.time_ns() // 1_000_000)  # Not known of an error that a server sent.
    found = LeaseHeld(key, owner=held.owner, expires_ms=held.expires_ms, now_ms=now_ms)
    left_seconds = max(held.expires_ms - now_ms, 0) / 1_000
    text = (
        f"{held.owner} holds {key} until {utc(held.expires_ms)}, for another {left_seconds:.0f} s; none of your keys "
        f"was acquired. Do not touch {key}: work on something else, call lease_acquire again with wait_seconds, or ask "
        f"{held.owner} with mail_send to release it"
    )
    if kept:
        text += f". You still hold {', '.join(kept)}, with new fences: see lease_list"
    found.args = (text,)
    return found


def _checked(key: str) -> str:
    """The key.

    Raises:
        InvalidName: it has characters that keys cannot have; the error says how to write it.
    """
    try:
        return checked_key("lease", key)
    except InvalidName as error:
        written = _written(key)
        if written == key:
            raise
        raise InvalidName(
            f"{error}. Write it as {written!r}: from the root of the repository, and any other character as = and the "
            "two hexadecimal digits of each of its UTF-8 bytes. All agents must write a key in the same way"
        ) from None


def _written(key: str) -> str:
    """A path as a key: without empty and relative parts, and with other characters than those of names encoded."""
    parts = [part for part in key.replace("\\", "/").split("/") if part not in ("", ".", "..")]
    return "/".join("".join(map(_written_character, part)) for part in parts)


def _written_character(character: str) -> str:
    if character.isascii() and (character.isalnum() or character in "._@:+-"):
        return character
    return "".join(f"={byte:02X}" for byte in character.encode(errors="replace"))


def _at_expiry(seconds: float) -> str:
    return (
        f"After {seconds:.0f} s, at expires_at, the leases end by themselves: any other agent can acquire the keys, "
        "and your lease_id and fence are refused. Call lease_keep before to keep them, and lease_release as soon as "
        "you are done."
    )


class LeaseProof(ToolInput, frozen=True):
    key: Key
    lease_id: LeaseId
    fence: Fence


_LEASES: Final = Meta(
    description="Leases as lease_acquire or lease_list returned them.", min_length=1, max_length=MCP_LEASE_KEYS_MAX
)


class LeaseKeep(ToolInput, frozen=True):
    leases: Annotated[list[LeaseProof], _LEASES]
    lease_seconds: LeaseSeconds = MCP_LEASE_SECONDS


async def _keep(caller: Caller, given: LeaseKeep) -> HeldLeases:
    kept: list[HeldLease] = []
    lost: list[Fenced] = []
    for proof in given.leases:
        lease = caller.plane.lease(_checked(proof.key)).held(proof.lease_id, fence=proof.fence)
        try:
            await lease.keepalive(given.lease_seconds)
        except Fenced as error:
            lost.append(error)
        else:
            kept.append(HeldLease.of(proof, expires_at=utc(lease.expires_ms)))
    if lost:
        others = ", ".join(lease.key for lease in kept)
        text = f"{lost[0]}. These leases of the call were kept: {others}" if kept else str(lost[0])
        raise type(lost[0])(text)
    return HeldLeases(leases=kept, at_expiry=_at_expiry(given.lease_seconds))


class LeaseRelease(ToolInput, frozen=True):
    leases: Annotated[list[LeaseProof], _LEASES]


class Released(ToolOutput, frozen=True):
    released: Annotated[list[str], Meta(description="Keys that are free now.")]
    not_held: Annotated[
        list[str],
        Meta(description="Keys that were not yours any more with this fence; another agent may have changed things."),
    ]


async def _release_all(caller: Caller, given: LeaseRelease) -> Released:
    released: dict[bool, list[str]] = {True: [], False: []}
    for proof in given.leases:
        lease = caller.plane.lease(_checked(proof.key)).held(proof.lease_id, fence=proof.fence)
        released[await lease.release()].append(proof.key)
    return Released(released=released[True], not_held=released[False])


class LeaseList(ToolInput, frozen=True):
    after: AfterName = ""
    limit: Annotated[int, Meta(description="How many keys to look at.", ge=1, le=MCP_LIST_MAX)] = MCP_LIST_MAX


class LeaseLine(ToolOutput, frozen=True, omit_defaults=True):
    key: Annotated[str, Meta(description="The key that is held.")]
    owner: Annotated[str, Meta(description="The agent that holds it.")]
    expires_at: ExpiresAt
    lease_id: Annotated[str | None, Meta(description="If it is your own lease.")] = None
    fence: Annotated[int | None, Meta(description="If it is your own lease.")] = None


class LeaseLines(ToolOutput, frozen=True):
    leases: Annotated[list[LeaseLine], Meta(description="In the order of the keys.")]
    next: Next


async def _list(caller: Caller, given: LeaseList) -> LeaseLines:
    page = await caller.plane.leases(after=given.after, limit=given.limit)
    lines = []
    for lease in page.leases:
        hidden = {} if lease.owner == caller.agent else {"lease_id": None, "fence": None}
        lines.append(LeaseLine.of(lease, **hidden))
    return LeaseLines(leases=lines, next=page.next)


TOOLS: Final[tuple[Tool[Any, Any], ...]] = (
    Tool(
        name="lease_acquire",
        title="Reserve keys",
        description=(
            "Reserve keys for yourself for a time, such as the files that you are about to edit: all of them or none. "
            "If another agent holds one, the error names it and says until when. A key that you hold already is "
            "granted again with a new fence, and the old fence is refused. Call lease_release when you are done."
        ),
        input=LeaseAcquire,
        output=HeldLeases,
        call=_acquire,
        verbs=("lease:acquire", "lease:describe", "lease:release"),
    ),
    Tool(
        name="lease_keep",
        title="Keep reservations longer",
        description=(
            "Keep leases that you hold, to lease_seconds from now; they are never shortened. Call it before "
            "expires_at. If it is refused, the lease has ended: stop writing, acquire the key again, and read what "
            "changed."
        ),
        input=LeaseKeep,
        output=HeldLeases,
        call=_keep,
        verbs=("lease:keepalive",),
        idempotent=True,
    ),
    Tool(
        name="lease_release",
        title="Release reservations",
        description="Release leases as soon as you are done, so that other agents can go on. Releasing twice is fine.",
        input=LeaseRelease,
        output=Released,
        call=_release_all,
        verbs=("lease:release",),
        idempotent=True,
    ),
    Tool(
        name="lease_list",
        title="List reservations",
        description=(
            "List the keys that agents hold now, with their owners. Use it to see which files are taken before you "
            "plan, and to find the lease_id and fence of your own leases again."
        ),
        input=LeaseList,
        output=LeaseLines,
        call=_list,
        verbs=("lease:list",),
        read_only=True,
    ),
)
