"""`fastness effect`: the external calls that worlds ask for. They can be carried out from a shell."""

from typing import Any, Final

import click

from fastness.cli import completion, connect, printing, values
from fastness.cli.commands import CommandGroup
from fastness.cli.durations import SECONDS
from fastness.cli.exit_codes import NOTHING_RECEIVED
from fastness.cli.operations import operation
from fastness.handles.sync.effects import EffectClaim
from fastness.handles.sync.plane import Plane
from fastness.limits import EFFECT_CLAIMS_MAX, EFFECT_LEASE_SECONDS
from fastness.wire.effects import EffectInfo, ListEffects

_COLUMNS: Final = ("world", "height", "number", "kind", "state", "due_at", "attempts", "fence", "owner", "error")


def _fields(found: EffectInfo) -> dict[str, Any]:
    fields = printing.fields(found, without=("intent_hash",))
    return {**fields, "idempotency_key": found.intent_hash.hex()}


effect = CommandGroup(completions={"world": completion.worlds})


operation(effect, "list", ListEffects, columns=_COLUMNS, show=_fields, arguments={"world": "[WORLD]"})


@effect.command(examples=["fastness effect claim charge_card --wait 20 --json"])
@click.argument("kinds", metavar="KIND…", nargs=-1, required=True)
@click.option("--owner", help="Who carries them out.  [default: a random name]")
@click.option("-n", "limit", type=click.IntRange(1, EFFECT_CLAIMS_MAX), default=1, help="At most this many effects.")
@click.option(
    "--lease", "lease_seconds", type=SECONDS, default=EFFECT_LEASE_SECONDS, help="The lease ends after this time."
)
@click.option("--wait", type=SECONDS, default=0.0, help="How long to wait for an effect.  [default: 0]")
def claim(kinds: tuple[str, ...], owner: str | None, limit: int, lease_seconds: float, wait: float) -> None:
    """Claim effects of these kinds that are due.

    Complete or fail each of them with its fence.

    An effect whose lease ends is claimed again. The exit code is 3 if none is due.
    """
    with connect.open_plane() as plane:
        claimed = plane.effects.claim(kinds, owner=owner, limit=limit, lease_seconds=lease_seconds, wait_seconds=wait)
    printing.rows([_fields(each.info) for each in claimed], _COLUMNS, empty="No effect is due.")
    if not claimed:
        click.get_current_context().exit(NOTHING_RECEIVED)


def _effect_arguments(command: Any) -> Any:
    for parameter in (
        click.option("--fence", type=int, required=True, help="The fence of the claim."),
        click.argument("number", type=click.IntRange(0)),
        click.argument("height", type=click.IntRange(0)),
        click.argument("world"),
    ):
        command = parameter(command)
    return command


@effect.command(examples=["fastness effect complete order-17 4 0 --fence 1 '{\"paid\": true}'"])
@_effect_arguments
@click.argument("result", required=False)
@click.option("--file", metavar="PATH", help="Take the result from this file; - is standard input.")
@click.option("--adapter", default="", help="Names what carried it out, for the receipt.")
def complete(
    *, world: str, height: int, number: int, fence: int, result: str | None, file: str | None, adapter: str
) -> None:
    """Complete an effect, and put its receipt into the inbox.

    The effect is the one with this NUMBER of the record HEIGHT of WORLD.
    """
    body = b""
    if result is not None or file is not None:
        with values.open_input(result, file) as stream:
            body = stream.read()
    with connect.open_plane() as plane:
        _claimed(plane, world, height, number, fence).complete(body, adapter_id=adapter)
    printing.result(
        f"Effect {number} of {world}/{height} is complete", {"world": world, "height": height, "number": number}
    )


@effect.command(examples=['fastness effect fail order-17 4 0 --fence 1 "the bank does not answer" --delay 1m'])
@_effect_arguments
@click.argument("error")
@click.option("--delay", type=SECONDS, help="Until the next attempt.  [default: a back-off]")
@click.option("--final", is_flag=True, help="Do not try again: the world gets a receipt with the error.")
def fail(*, world: str, height: int, number: int, fence: int, error: str, delay: float | None, final: bool) -> None:
    """Record that an attempt to carry out an effect failed.

    The effect is due again later, or dead after its last attempt.
    """
    with connect.open_plane() as plane:
        found = _claimed(plane, world, height, number, fence).fail(error, delay_seconds=delay, final=final)
    due_at = printing.timestamp(found.due_ms)
    printing.result(
        f"Effect {number} of {world}/{height} is {'dead' if found.is_dead else f'due again at {due_at}'}",
        {"world": world, "height": height, "number": number, "is_dead": found.is_dead, "due_at": due_at},
    )


def _claimed(plane: Plane, world: str, height: int, number: int, fence: int) -> EffectClaim:
    return plane.effects.claimed(world, height, number, fence=fence)
