"""`fastness lease`: exclusive ownership of keys, with fences. `lease_run` runs a command while a lease is held."""

import os
import socket
from typing import Any, Final, TypedDict

import click

from fastness.cli import completion, connect, exports, lease_run, printing
from fastness.cli.commands import CommandGroup, wants_json
from fastness.cli.durations import SECONDS, WAIT
from fastness.cli.operations import operation
from fastness.errors import FastnessError, InvalidArgument, LeaseHeld
from fastness.handles.sync.leases import Lease
from fastness.handles.sync.plane import Plane
from fastness.limits import LEASE_TTL_SECONDS
from fastness.wire.leases import BreakLease, DescribeLease, Granted, ListLeases

_VARIABLES: Final = ("FASTNESS_LEASE_KEY", "FASTNESS_LEASE_ID", "FASTNESS_FENCE", "FASTNESS_LEASE_TXN_ID")


lease = CommandGroup(completions=dict.fromkeys(("key", "lease_key"), completion.leases))


def _acquire_options(command: Any) -> Any:
    for option in (
        click.option("--txn-id", help="Bind the lease to this transaction id."),
        click.option(
            "--owner", help="The owner of the lease. The same owner can renew it.  [default: this host and process]"
        ),
        click.option(
            "--wait", type=WAIT, default=0.0, help="How long to wait for the lease, or `forever`.  [default: 0]"
        ),
        click.option(
            "--ttl", type=SECONDS, default=LEASE_TTL_SECONDS, help="The lease expires after this time.  [default: 30]"
        ),
    ):
        command = option(command)
    return command


@lease.command(
    examples=[
        "fastness lease run deploy -- ./deploy.sh",
        "fastness lease run nightly --wait 10m --ttl 1m -- make report",
    ],
)
@click.argument("key", metavar="KEY")
@click.argument("command", metavar="-- COMMAND…", nargs=-1, required=True, type=click.UNPROCESSED)
@_acquire_options
@click.option(
    "--grace", type=SECONDS, default=5.0, help="The time from SIGTERM to SIGKILL if the lease is lost.  [default: 5]"
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
    """Run COMMAND while the lease of KEY is held.

    The exit code is that of COMMAND. The lease is renewed every third of its --ttl. If it is lost anyway, COMMAND is
    stopped with SIGTERM and then SIGKILL before another owner can acquire it, and the exit code is 6. COMMAND's
    environment has FASTNESS_LEASE_KEY, FASTNESS_LEASE_ID and FASTNESS_FENCE, a number that grows with each grant; the
    systems that COMMAND writes to can reject older fences. Signals are forwarded to COMMAND.
    """
    with connect.PlaneCaller(connect.current_target(), create=True) as caller:
        granted = _acquire(caller, key, ttl=ttl, wait=wait, owner=owner, txn_id=txn_id)
        try:
            renewer = lease_run.LeaseRenewer(
                lambda: caller.call(lambda plane: _lease_handle(plane, granted, ttl).keepalive()), ttl
            )
            code = lease_run.run(command, {**os.environ, **_variables(granted)}, renewer, grace_seconds=grace)
        finally:
            _release(caller, granted)
    click.get_current_context().exit(code)


@lease.command(examples=['eval "$(fastness lease acquire deploy --wait 60)"; …; fastness lease release'])
@click.argument("key", metavar="KEY")
@_acquire_options
def acquire(key: str, ttl: float, wait: float, owner: str | None, txn_id: str | None) -> None:
    """Acquire the lease of KEY, and export it.

    `lease keepalive` and `lease release` read what it exports.
    """
    with exports.unset_on_failure(_VARIABLES), connect.PlaneCaller(connect.current_target(), create=True) as caller:
        granted = _acquire(caller, key, ttl=ttl, wait=wait, owner=owner, txn_id=txn_id)
    printing.record(printing.fields(granted)) if wants_json() else click.echo(exports.export_lines(_variables(granted)))


class LeaseOptions(TypedDict):
    """The values of the options that identify a lease."""

    lease_key: str | None
    lease_id: str | None
    fence: int | None
    txn_id: str | None
    leased: bool


def lease_options(command: Any) -> Any:
    """The options that identify a lease."""
    for option in (
        click.option("--leased", is_flag=True, help="Use the lease that `lease run` or `lease acquire` exported."),
        click.option("--txn-id", help="The transaction id that the lease was acquired with."),
        click.option("--fence", type=int, help="The fence of the held lease."),
        click.option("--lease-id", help="The id of the held lease."),
        click.option("--lease-key", metavar="KEY", help="The key of the held lease."),
    ):
        command = option(command)
    return command


def held_lease(
    plane: Plane,
    *,
    lease_key: str | None,
    lease_id: str | None,
    fence: int | None,
    txn_id: str | None,
    leased: bool,
    ttl_seconds: float = LEASE_TTL_SECONDS,
) -> Lease | None:
    """The lease that the options identify, or with `leased` the environment; None if neither does.

    Raises:
        InvalidArgument: the lease is identified only in part.
    """
    if leased:
        lease_key = lease_key or os.environ.get("FASTNESS_LEASE_KEY")
        lease_id = lease_id or os.environ.get("FASTNESS_LEASE_ID")
        txn_id = txn_id or os.environ.get("FASTNESS_LEASE_TXN_ID") or None
        found = os.environ.get("FASTNESS_FENCE", "")
        fence = int(found) if fence is None and found.isdigit() else fence
    if lease_key is None and lease_id is None and fence is None and not leased:
        return None
    if lease_key is None or lease_id is None or fence is None:
        raise InvalidArgument(
            'No lease given; run eval "$(fastness lease acquire KEY)" first, or give its key, --lease-id and --fence'
        )
    return plane.lease(lease_key).held(lease_id, fence=fence, txn_id=txn_id, ttl_seconds=ttl_seconds)


def _exported_lease_options(command: Any) -> Any:
    """The options that identify a lease, which default to the exported variables."""
    for option in (
        click.option("--txn-id", envvar="FASTNESS_LEASE_TXN_ID", help="The transaction id of the lease."),
        click.option("--fence", type=int, envvar="FASTNESS_FENCE", help="The fence of the held lease."),
        click.option("--lease-id", envvar="FASTNESS_LEASE_ID", help="The id of the held lease."),
        click.argument("lease_key", metavar="[KEY]", envvar="FASTNESS_LEASE_KEY", required=False),
    ):
        command = option(command)
    return command


@lease.command()
@_exported_lease_options
@click.option("--ttl", type=SECONDS, default=LEASE_TTL_SECONDS, help="The minimum lease time from now.  [default: 30]")
def keepalive(ttl: float, lease_key: str | None, lease_id: str | None, fence: int | None, txn_id: str | None) -> None:
    """Renew a lease that is held. Renewing never shortens it."""
    with connect.open_plane() as plane:
        lease = _require_lease(plane, lease_key, lease_id, fence, txn_id, ttl_seconds=ttl)
        until = printing.timestamp(round(lease.keepalive().timestamp() * 1_000))
    printing.result(f"{lease.key} is held until {until}", {"key": lease.key, "expires_at": until})


@lease.command()
@_exported_lease_options
def release(lease_key: str | None, lease_id: str | None, fence: int | None, txn_id: str | None) -> None:
    """Release a lease. Repeating this is safe."""
    with connect.open_plane() as plane:
        lease = _require_lease(plane, lease_key, lease_id, fence, txn_id)
        released = lease.release()
    printing.result(f"{lease.key} {_released_text(released)}", {"key": lease.key, "released": released})


operation(
    lease,
    "break",
    BreakLease,
    text=lambda fields: f"{fields['key']} {_released_text(fields['released'])}",
    examples=["fastness lease show deploy", "fastness lease break deploy --fence 41"],
)
operation(
    lease,
    "show",
    DescribeLease,
    show=lambda found: {**printing.fields(found.lease), "held": found.held, "waiting": found.waiting},
    missing="The lease of {key} was never acquired",
)
operation(
    lease,
    "list",
    ListLeases,
    columns=("key", "owner", "fence", "acquired_at", "expires_at"),
    empty="No leases are held.",
)


def _released_text(released: bool) -> str:
    return "is released" if released else "was not held any more"


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
    lease_key: str | None,
    lease_id: str | None,
    fence: int | None,
    txn_id: str | None,
    *,
    ttl_seconds: float = LEASE_TTL_SECONDS,
) -> Lease:
    lease = held_lease(
        plane,
        lease_key=lease_key,
        lease_id=lease_id,
        fence=fence,
        txn_id=txn_id,
        leased=True,
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
