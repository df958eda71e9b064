"""`fastness lock`: distributed locks with fencing tokens. `lock_run` runs a command while a lock is held."""

import os
import socket
from typing import Any, Final, TypedDict

import click

from fastness.cli import completion, connect, exports, lock_run, printing
from fastness.cli.commands import CommandGroup, wants_json
from fastness.cli.durations import SECONDS, WAIT
from fastness.errors import FastnessError, InvalidArgument, LeaseHeld, NotFound
from fastness.handles.sync.leases import Lease
from fastness.handles.sync.plane import Plane
from fastness.limits import LEASE_TTL_SECONDS, READ_ENTRIES_MAX
from fastness.wire.leases import Granted

_VARIABLES: Final = ("FASTNESS_LOCK_KEY", "FASTNESS_LEASE_ID", "FASTNESS_FENCE", "FASTNESS_LEASE_TXN_ID")
_COLUMNS: Final = ("key", "owner", "fencing_token", "acquired_at", "expires_at")


@click.group(cls=CommandGroup, completions={"key": completion.locks, "lock_key": completion.locks})
def lock() -> None:
    """Acquire, hold and release locks across machines."""


def _acquire_options(command: Any) -> Any:
    for option in (
        click.option("--txn-id", help="Bind the lock to this transaction id."),
        click.option(
            "--owner", help="The owner of the lock. The same owner can renew it.  [default: this host and process]"
        ),
        click.option(
            "--wait", type=WAIT, default=0.0, help="How long to wait for the lock, or `forever`.  [default: 0]"
        ),
        click.option(
            "--ttl", type=SECONDS, default=LEASE_TTL_SECONDS, help="The lock expires after this time.  [default: 30]"
        ),
    ):
        command = option(command)
    return command


@lock.command(
    examples=[
        "fastness lock run deploy -- ./deploy.sh",
        "fastness lock run nightly --wait 10m --ttl 1m -- make report",
    ],
)
@click.argument("key", metavar="NAME")
@click.argument("command", metavar="-- COMMAND…", nargs=-1, required=True, type=click.UNPROCESSED)
@_acquire_options
@click.option(
    "--grace", type=SECONDS, default=5.0, help="The time from SIGTERM to SIGKILL if the lock is lost.  [default: 5]"
)
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
    """Run COMMAND while holding the lock NAME, and exit with COMMAND's exit code.

    The lock is renewed every third of its --ttl. If it is lost anyway, COMMAND is stopped with SIGTERM and then SIGKILL
    before another owner can acquire the lock, and the exit code is 6. COMMAND's environment has FASTNESS_LOCK_KEY,
    FASTNESS_LEASE_ID and FASTNESS_FENCE, a number that grows with each grant; the systems that COMMAND writes to can
    reject older fences. Signals are forwarded to COMMAND.
    """
    with connect.PlaneCaller(connect.current_target(), create=True) as caller:
        granted = _acquire(caller, key, ttl=ttl, wait=wait, owner=owner, txn_id=txn_id)
        try:
            renewer = lock_run.LockRenewer(
                lambda: caller.call(lambda plane: _lease_handle(plane, granted, ttl).keepalive()), ttl
            )
            code = lock_run.run(command, {**os.environ, **_variables(granted)}, renewer, grace_seconds=grace)
        finally:
            _release(caller, granted)
    click.get_current_context().exit(code)


@lock.command(examples=['eval "$(fastness lock acquire deploy --wait 60)"; …; fastness lock release'])
@click.argument("key", metavar="NAME")
@_acquire_options
def acquire(key: str, ttl: float, wait: float, owner: str | None, txn_id: str | None) -> None:
    """Acquire the lock NAME for --ttl, and export its lease for `lock keepalive` and `lock release`."""
    with exports.unset_on_failure(_VARIABLES), connect.PlaneCaller(connect.current_target(), create=True) as caller:
        granted = _acquire(caller, key, ttl=ttl, wait=wait, owner=owner, txn_id=txn_id)
    printing.record(_fields(granted)) if wants_json() else click.echo(exports.export_lines(_variables(granted)))


class LeaseOptions(TypedDict):
    """The values of the options that identify a lease."""

    lock_key: str | None
    lease_id: str | None
    fence: int | None
    txn_id: str | None
    locked: bool


def lease_options(command: Any) -> Any:
    """The options that identify a lease."""
    for option in (
        click.option("--locked", is_flag=True, help="Use the lock that `lock run` or `lock acquire` exported."),
        click.option("--txn-id", help="The transaction id that the lock was acquired with."),
        click.option("--fence", type=int, help="The fence of the lock's lease."),
        click.option("--lease-id", help="The id of the lock's lease."),
        click.option("--lock", "lock_key", metavar="NAME", help="The name of the held lock."),
    ):
        command = option(command)
    return command


def held_lease(
    plane: Plane,
    *,
    lock_key: str | None,
    lease_id: str | None,
    fence: int | None,
    txn_id: str | None,
    locked: bool,
    ttl_seconds: float = LEASE_TTL_SECONDS,
) -> Lease | None:
    """The lease that the options identify, or with `locked` the environment; None if neither does.

    Raises:
        InvalidArgument: the lease is identified only in part.
    """
    if locked:
        lock_key = lock_key or os.environ.get("FASTNESS_LOCK_KEY")
        lease_id = lease_id or os.environ.get("FASTNESS_LEASE_ID")
        txn_id = txn_id or os.environ.get("FASTNESS_LEASE_TXN_ID") or None
        found = os.environ.get("FASTNESS_FENCE", "")
        fence = int(found) if fence is None and found.isdigit() else fence
    if lock_key is None and lease_id is None and fence is None and not locked:
        return None
    if lock_key is None or lease_id is None or fence is None:
        raise InvalidArgument(
            'No lock given; run eval "$(fastness lock acquire NAME)" first, or give its name, --lease-id and --fence'
        )
    return plane.lease(lock_key).held(lease_id, fence=fence, txn_id=txn_id, ttl_seconds=ttl_seconds)


def _exported_lease_options(command: Any) -> Any:
    """The options that identify a lease, which default to the exported variables."""
    for option in (
        click.option("--txn-id", envvar="FASTNESS_LEASE_TXN_ID", help="The transaction id of the lock."),
        click.option("--fence", type=int, envvar="FASTNESS_FENCE", help="The fence of the lock's lease."),
        click.option("--lease-id", envvar="FASTNESS_LEASE_ID", help="The id of the lock's lease."),
        click.argument("lock_key", metavar="[NAME]", envvar="FASTNESS_LOCK_KEY", required=False),
    ):
        command = option(command)
    return command


@lock.command()
@_exported_lease_options
@click.option("--ttl", type=SECONDS, default=LEASE_TTL_SECONDS, help="The minimum lease time from now.  [default: 30]")
def keepalive(ttl: float, lock_key: str | None, lease_id: str | None, fence: int | None, txn_id: str | None) -> None:
    """Renew a held lock. Renewing never shortens a lease."""
    with connect.open_plane() as plane:
        lease = _require_lease(plane, lock_key, lease_id, fence, txn_id, ttl_seconds=ttl)
        until = printing.timestamp(round(lease.keepalive().timestamp() * 1_000))
    printing.result(f"{lease.key} is held until {until}", {"key": lease.key, "expires_at": until})


@lock.command()
@_exported_lease_options
def release(lock_key: str | None, lease_id: str | None, fence: int | None, txn_id: str | None) -> None:
    """Release a lock. Repeating this is safe."""
    with connect.open_plane() as plane:
        lease = _require_lease(plane, lock_key, lease_id, fence, txn_id)
        released = lease.release()
    text = "is released" if released else "was not held any more"
    printing.result(f"{lease.key} {text}", {"key": lease.key, "released": released})


@lock.command("break", examples=["fastness lock describe deploy", "fastness lock break deploy --fence 41"])
@click.argument("key", metavar="NAME")
@click.option("--fence", type=int, required=True, help="The fence of the lease to end, as `lock describe` shows it.")
def break_(key: str, fence: int) -> None:
    """End the lease of any owner on the lock NAME. Its holder is fenced off, and the next one in line gets the lock.

    Do this if a holder hangs and its lock is renewed nonetheless. A lock that was granted again since has a higher
    fence, and is not ended.
    """
    with connect.open_plane() as plane:
        released = plane.lease(key).break_lease(fence=fence)
    text = "is released" if released else "was not held any more"
    printing.result(f"{key} {text}", {"key": key, "released": released})


@lock.command()
@click.argument("key", metavar="NAME")
def describe(key: str) -> None:
    """Show the last owner of a lock, and whether it still holds the lock."""
    with connect.open_plane() as plane:
        found = plane.lease(key).describe()
    if found.lease is None:
        raise NotFound(f"Lock {key} was never acquired")
    printing.record({**_fields(found.lease), "held": found.held, "waiting": found.waiting})


@lock.command("list")
@click.option("--after", default="", help="Start after this name.")
@click.option("--limit", type=click.IntRange(1, READ_ENTRIES_MAX), default=1_000, help="The maximum number of results.")
def list_(after: str, limit: int) -> None:
    """List the locks that are held."""
    found: list[Granted] = []
    with connect.open_plane() as plane:
        next_key: str | None = after
        while next_key is not None and len(found) < limit:
            page = plane.leases(after=next_key, limit=min(limit, 1_000))
            found, next_key = found + page.leases, page.next
    printing.rows([_fields(each) for each in found[:limit]], _COLUMNS, empty="No locks are held.")


def _acquire(
    caller: connect.PlaneCaller, key: str, *, ttl: float, wait: float, owner: str | None, txn_id: str | None
) -> Granted:
    owner = owner or f"{socket.gethostname()}:{os.getpid()}"
    refusal: list[LeaseHeld] = []

    def acquire(plane: Plane, seconds: float) -> Granted | None:
        try:
            lease = plane.lease(key).acquire(owner, ttl_seconds=ttl, wait_seconds=seconds, txn_id=txn_id)
        except LeaseHeld as error:
            refusal[:] = [error]
            return None
        return Granted(lease.key, lease.id, lease.owner, lease.fence, 0, lease.expires_ms, txn_id)

    found = caller.poll(acquire, wait)
    if found is None:
        raise refusal[0]
    return found


def _release(caller: connect.PlaneCaller, granted: Granted) -> None:
    try:
        caller.call(lambda plane: _lease_handle(plane, granted, LEASE_TTL_SECONDS).release())
    except FastnessError as error:
        click.echo(f"fastness: cannot release {granted.key} ({error}); it expires by itself", err=True)


def _require_lease(
    plane: Plane,
    lock_key: str | None,
    lease_id: str | None,
    fence: int | None,
    txn_id: str | None,
    *,
    ttl_seconds: float = LEASE_TTL_SECONDS,
) -> Lease:
    lease = held_lease(
        plane,
        lock_key=lock_key,
        lease_id=lease_id,
        fence=fence,
        txn_id=txn_id,
        locked=True,
        ttl_seconds=ttl_seconds,
    )
    assert lease is not None
    return lease


def _lease_handle(plane: Plane, granted: Granted, ttl_seconds: float) -> Lease:
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
        "acquired_at": printing.timestamp(granted.acquired_ms),
        "expires_at": printing.timestamp(granted.expires_ms),
        "txn_id": granted.txn_id,
    }
