"""`holdfast lock`: one at a time, and proof of it. `runs` has what holds a lock while a command runs."""

import os
import socket
from typing import Any, Final

import click

from holdfast.cli import connect, exports, lock_run, printing
from holdfast.cli.commands import Noun, wants_json
from holdfast.cli.durations import SECONDS, WAIT
from holdfast.errors import HoldfastError, InvalidArgument, LeaseHeld, NotFound
from holdfast.handles import Plane
from holdfast.handles.sync.leases import Lease
from holdfast.limits import LEASE_TTL_SECONDS, READ_ENTRIES_MAX
from holdfast.wire.leases import Granted

_VARIABLES: Final = ("HOLDFAST_LOCK_KEY", "HOLDFAST_LEASE_ID", "HOLDFAST_FENCE", "HOLDFAST_LEASE_TXN_ID")
_HELD: Final = ("key", "owner", "fencing_token", "acquired_at", "expires_at")


@click.group(cls=Noun)
def lock() -> None:
    """One at a time, between any number of machines."""


def _waits(command: Any) -> Any:
    for option in (
        click.option("--txn-id", help="Let it count only within this transaction of yours."),
        click.option("--owner", help="Who holds it; the same owner renews it.  [default: this host and process]"),
        click.option("--wait", type=WAIT, default=0.0, help="How long to wait for it, or `forever`.  [default: 0]"),
        click.option("--ttl", type=SECONDS, default=LEASE_TTL_SECONDS, help="When it ends by itself.  [default: 30]"),
    ):
        command = option(command)
    return command


@lock.command(
    examples=[
        "holdfast lock run deploy -- ./deploy.sh",
        "holdfast lock run nightly --wait 10m --ttl 1m -- make report",
    ],
)
@click.argument("key", metavar="NAME")
@click.argument("command", metavar="-- COMMAND…", nargs=-1, required=True, type=click.UNPROCESSED)
@_waits
@click.option("--grace", type=SECONDS, default=5.0, help="From SIGTERM to SIGKILL when the lock is lost.  [default: 5]")
def run(
    *,
    key: str,
    command: tuple[str, ...],
    ttl: float,
    wait: float,
    owner: str | None,
    txn_id: str | None,
    grace: float,
) -> None:
    """Run COMMAND while holding the lock NAME; its exit code is that of COMMAND.

    The lock is kept alive at a third of its --ttl. If it is lost all the same, COMMAND is stopped, by SIGTERM and then
    SIGKILL, before somebody else can get it, and the exit code is 6. COMMAND finds HOLDFAST_LOCK_KEY,
    HOLDFAST_LEASE_ID and HOLDFAST_FENCE in its environment: a number that only grows, to be checked by whatever COMMAND
    writes to. Signals are passed on to it.
    """
    with connect.Visits(connect.target()) as visits:
        granted = _acquired(visits, key, ttl=ttl, wait=wait, owner=owner, txn_id=txn_id)
        try:
            renewal = lock_run.Renewal(lambda: visits.call(lambda plane: _lease(plane, granted, ttl).keepalive()), ttl)
            code = lock_run.run(command, {**os.environ, **_variables(granted)}, renewal, grace_seconds=grace)
        finally:
            _release(visits, granted)
    click.get_current_context().exit(code)


@lock.command(examples=['eval "$(holdfast lock acquire deploy --wait 60)"; …; holdfast lock release'])
@click.argument("key", metavar="NAME")
@_waits
def acquire(key: str, ttl: float, wait: float, owner: str | None, txn_id: str | None) -> None:
    """Get the lock NAME until --ttl is over, and export what `lock keepalive` and `lock release` need."""
    with exports.forgotten_on_failure(_VARIABLES), connect.Visits(connect.target()) as visits:
        granted = _acquired(visits, key, ttl=ttl, wait=wait, owner=owner, txn_id=txn_id)
    printing.record(_fields(granted)) if wants_json() else click.echo(exports.lines(_variables(granted)))


def lease_options(command: Any) -> Any:
    """The options that name a lease."""
    for option in (
        click.option("--locked", is_flag=True, help="Under the lock that `lock run` or `lock acquire` exported."),
        click.option("--txn-id", help="The transaction that the lock was acquired for."),
        click.option("--fence", type=int, help="The fence that came with the lock."),
        click.option("--lease-id", help="The lease that was acquired."),
        click.option("--lock", "lock_key", metavar="NAME", help="The lock that is held."),
    ):
        command = option(command)
    return command


def lease_of(
    plane: Plane,
    *,
    lock_key: str | None,
    lease_id: str | None,
    fence: int | None,
    txn_id: str | None,
    locked: bool,
    ttl_seconds: float = LEASE_TTL_SECONDS,
) -> Lease | None:
    """The lease that options or, if asked to, variables name; None if none is.

    Raises:
        InvalidArgument: it is named by halves.
    """
    if locked:
        lock_key = lock_key or os.environ.get("HOLDFAST_LOCK_KEY")
        lease_id = lease_id or os.environ.get("HOLDFAST_LEASE_ID")
        txn_id = txn_id or os.environ.get("HOLDFAST_LEASE_TXN_ID") or None
        found = os.environ.get("HOLDFAST_FENCE", "")
        fence = int(found) if fence is None and found.isdigit() else fence
    if lock_key is None and lease_id is None and fence is None and not locked:
        return None
    if lock_key is None or lease_id is None or fence is None:
        raise InvalidArgument(
            'No lock is named; run eval "$(holdfast lock acquire NAME)" first, or give its name, --lease-id and --fence'
        )
    return plane.lease(lock_key).held(lease_id, fence=fence, txn_id=txn_id, ttl_seconds=ttl_seconds)


def _named(command: Any) -> Any:
    """The options that name a lease, which default to what was exported."""
    for option in (
        click.option("--txn-id", envvar="HOLDFAST_LEASE_TXN_ID", help="The transaction that it was acquired for."),
        click.option("--fence", type=int, envvar="HOLDFAST_FENCE", help="The fence that came with it."),
        click.option("--lease-id", envvar="HOLDFAST_LEASE_ID", help="The lease that was acquired."),
        click.argument("lock_key", metavar="[NAME]", envvar="HOLDFAST_LOCK_KEY", required=False),
    ):
        command = option(command)
    return command


@lock.command()
@_named
@click.option("--ttl", type=SECONDS, default=LEASE_TTL_SECONDS, help="At least how long from now.  [default: 30]")
def keepalive(ttl: float, **named: Any) -> None:
    """Let a lock that is held last longer. It never gets shorter."""
    with connect.opened() as plane:
        lease = _required(plane, ttl, named)
        until = printing.moment(round(lease.keepalive().timestamp() * 1_000))
    printing.done(f"{lease.key} is held until {until}", {"key": lease.key, "expires_at": until})


@lock.command()
@_named
def release(**named: Any) -> None:
    """Give a lock back. Giving back twice is fine."""
    with connect.opened() as plane:
        lease = _required(plane, LEASE_TTL_SECONDS, named)
        released = lease.release()
    said = "is free" if released else "was not held any more"
    printing.done(f"{lease.key} {said}", {"key": lease.key, "released": released})


@lock.command()
@click.argument("key", metavar="NAME")
def describe(key: str) -> None:
    """Who had the lock last, and whether they still have it."""
    with connect.opened() as plane:
        found = plane.lease(key).describe()
    if found.lease is None:
        raise NotFound(f"Nobody has ever held {key}")
    printing.record({**_fields(found.lease), "held": found.held, "waiting": found.waiting})


@lock.command("list")
@click.option("--after", default="", help="Begin behind this name.")
@click.option("--limit", type=click.IntRange(1, READ_ENTRIES_MAX), default=1_000, help="At most so many.")
def list_(after: str, limit: int) -> None:
    """The locks that are held now."""
    found: list[Granted] = []
    with connect.opened() as plane:
        place: str | None = after
        while place is not None and len(found) < limit:
            page = plane.leases(after=place, limit=min(limit, 1_000))
            found, place = found + page.leases, page.next
    printing.rows([_fields(each) for each in found[:limit]], _HELD, nothing="No lock is held.")


def _acquired(
    visits: connect.Visits, key: str, *, ttl: float, wait: float, owner: str | None, txn_id: str | None
) -> Granted:
    owner = owner or f"{socket.gethostname()}:{os.getpid()}"
    refusal: list[LeaseHeld] = []

    def look(plane: Plane, seconds: float) -> Granted | None:
        try:
            lease = plane.lease(key).acquire(owner, ttl_seconds=ttl, wait_seconds=seconds, txn_id=txn_id)
        except LeaseHeld as error:
            refusal[:] = [error]
            return None
        return Granted(lease.key, lease.id, lease.owner, lease.fence, 0, lease.expires_ms, txn_id)

    found = visits.find(look, wait)
    if found is None:
        raise refusal[0]
    return found


def _release(visits: connect.Visits, granted: Granted) -> None:
    try:
        visits.call(lambda plane: _lease(plane, granted, LEASE_TTL_SECONDS).release())
    except HoldfastError as error:
        click.echo(f"holdfast: {granted.key} was not given back ({error}); it ends by itself", err=True)


def _required(plane: Plane, ttl_seconds: float, named: dict[str, Any]) -> Lease:
    lease = lease_of(plane, locked=True, ttl_seconds=ttl_seconds, **named)
    assert lease is not None
    return lease


def _lease(plane: Plane, granted: Granted, ttl_seconds: float) -> Lease:
    return plane.lease(granted.key).held(
        granted.lease_id, fence=granted.fence, txn_id=granted.txn_id, ttl_seconds=ttl_seconds
    )


def _variables(granted: Granted) -> dict[str, str]:
    return dict(zip(_VARIABLES, (granted.key, granted.lease_id, str(granted.fence), granted.txn_id or ""), strict=True))


def _fields(granted: Granted) -> dict[str, Any]:
    return {
        "key": granted.key,
        "lease_id": granted.lease_id,
        "owner": granted.owner,
        "fencing_token": granted.fence,
        "acquired_at": printing.moment(granted.acquired_ms),
        "expires_at": printing.moment(granted.expires_ms),
        "txn_id": granted.txn_id,
    }
