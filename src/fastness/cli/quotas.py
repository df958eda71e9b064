"""`fastness quota`: how much a universe may hold and do."""

import time
from typing import Any

import click
import msgspec

from fastness.cli import completion, connect, printing
from fastness.cli.commands import CommandGroup, wants_json
from fastness.cli.field_options import field_options, given
from fastness.cli.operations import operation
from fastness.cli.sizes import size_text
from fastness.errors import InvalidArgument
from fastness.wire.quotas import Quota, SetQuota, Usage

quota = CommandGroup(completions={"universe": completion.universes})


@quota.command(
    "set",
    examples=[
        "fastness quota set shop --messages 1000000 --bytes 10GiB --connections 200 --rate 500",
        "fastness quota set shop --rate none",
    ],
)
@click.argument("universe")
@field_options(Quota, changes=True)
def set_(universe: str, **limits: Any) -> None:
    """Set limits of a universe. Limits that are not given stay as they are; `none` removes one.

    What is over a limit is refused (quota_exceeded). Reads, acks and deletions still work in a full universe. A
    universe may hold more than a new limit allows: then more is refused until it holds less.
    """
    changes = given(limits)
    if not changes:
        raise InvalidArgument("Give at least one limit: --messages, --bytes, --connections or --rate")
    with connect.open_plane(create=True) as plane:
        new = plane.quotas.set(universe, msgspec.structs.replace(plane.quotas.get(universe), **changes))
    printing.result(f"Universe {universe}: {_quota_text(new)}", {"universe": universe, **printing.fields(new)})


@quota.command(examples=["fastness quota show shop", "fastness quota show shop --json"])
@click.argument("universe", required=False)
def show(universe: str | None) -> None:
    """Show what a universe holds and does, and its quota. Without a name, of the universe of this command.

    Messages and bytes are never below what is stored. What was acked or deleted since the measurement may be in them.
    Connections and calls are those of the server that answers.
    """
    universe = universe or connect.current_target().universe
    with connect.open_plane() as plane:
        found = plane.quotas.usage(universe)
    if wants_json():
        printing.record({"universe": universe, **msgspec.to_builtins(found), "quota": printing.fields(found.quota)})
        return
    click.echo("\n".join(usage_lines(universe, found, time.time() * 1_000)))


operation(
    quota,
    "clear",
    SetQuota,
    "Universe {universe} has no quota",
    help="Remove all limits of a universe.",
    examples=["fastness quota clear shop"],
)


def usage_lines(universe: str, found: Usage, now_ms: float) -> list[str]:
    """What a universe holds and does, one line for each kind."""
    quota = found.quota
    lines = [
        f"universe     {universe}",
        f"messages     {_share(f'{found.messages:,}', found.messages, quota.messages)}",
        f"bytes        {_bytes_text(found)}",
        f"connections  {_share(f'{found.connections:,}', found.connections, quota.connections)}",
        f"calls        {found.calls_per_second:g} per second"
        + (f" of {quota.rate_per_second:g}" if quota.rate_per_second is not None else ""),
        f"measured     {max(now_ms - found.measured_ms, 0) / 1_000:.0f} s ago",
    ]
    return [printing.escape_control(line) for line in lines]


def _bytes_text(found: Usage) -> str:
    if found.bytes is None:
        return "not measured yet"
    limit = found.quota.bytes
    text = size_text(found.bytes)
    return text if limit is None else f"{text} of {size_text(limit)}{_percent(found.bytes, limit)}"


def _share(text: str, used: float, limit: int | None) -> str:
    return text if limit is None else f"{text} of {limit:,}{_percent(used, limit)}"


def _percent(used: float, limit: int) -> str:
    return f" ({used / limit:.0%})" if limit else ""


def _quota_text(quota: Quota) -> str:
    texts = [
        None if quota.messages is None else f"{quota.messages:,} messages",
        None if quota.bytes is None else size_text(quota.bytes),
        None if quota.connections is None else f"{quota.connections:,} connections",
        None if quota.rate_per_second is None else f"{quota.rate_per_second:g} calls per second",
    ]
    return ", ".join(text for text in texts if text is not None) or "no quota"
