"""`fastness encryption`: encryption at rest, with a key for each universe."""

import time
from typing import Any

import click

from fastness.cli import connect, printing
from fastness.cli.commands import CommandGroup, wants_json
from fastness.encryption_keys import new_master_key
from fastness.wire.encryption import UniverseEncryption

_PLANE = "(plane)"  # The plane's own key, which encrypts what belongs to no universe.


def _fields(found: UniverseEncryption) -> dict[str, Any]:
    return printing.fields(found, created_ms="newest_key_at")


encryption = CommandGroup(help="Without the master key, encrypted data is lost.")


@encryption.command("new-key", examples=["fastness encryption new-key > keys && chmod 600 keys"])
@click.argument("name", default="")
def new_key(name: str) -> None:
    """Print a new master key, as a line of a key file. Keep a copy of the file apart from the data and its backups.

    NAME distinguishes the keys of a file; by default it has the date. The last key of a file wraps data keys, and all
    of them unwrap.
    """
    line = new_master_key(name or time.strftime("master-%Y-%m-%d", time.gmtime()))
    click.echo("Keep a copy of this key apart from the data: without it, encrypted data is lost.", err=True)
    click.echo(line)


@encryption.command(examples=["fastness encryption enable shop", "fastness --url dir:./data encryption enable shop"])
@click.argument("universe")
def enable(universe: str) -> None:
    """Encrypt the data of UNIVERSE from now on.

    Its values and objects are encrypted. It cannot be turned off again.

    Values that are stored already stay as they are until `fastness encryption rewrite`. The plane must have a master
    key: --encryption-key-file of the server, or FASTNESS_ENCRYPTION_KEY_FILE for a data directory.
    """
    with connect.open_plane(create=True) as plane:
        found = plane.encryption.enable(universe)
    text = (
        f"The universe {universe} is encrypted. Encrypt what it stored before: fastness encryption rewrite {universe}"
    )
    printing.result(text if not found.all_encrypted else f"The universe {universe} is encrypted", _fields(found))


@encryption.command(examples=["fastness encryption show", "fastness encryption show --json"])
def show() -> None:
    """Show which universes are encrypted, and their keys.

    Also shows how many keys there are, their age, and whether older values are left.
    """
    with connect.open_plane() as plane:
        found = plane.encryption.show()
    printing.rows(
        [_row(each) for each in found.universes],
        ["universe", "keys", "newest_key_at", "older_values"],
        empty="No universe is encrypted.",
    )
    if not found.available and not wants_json():
        click.echo("The plane was opened without a master key, so no universe can be encrypted.", err=True)


@encryption.command(
    examples=[
        "fastness encryption rotate shop && fastness encryption rewrite shop",
        "fastness encryption rotate --master shop",
        "fastness encryption rotate --plane",
    ]
)
@click.argument("universe", default="")
@click.option("--plane", "is_plane", is_flag=True, help="Rotate the key for what belongs to no universe.")
@click.option("--master", is_flag=True, help="Keep the data keys, and wrap them with the newest master key.")
def rotate(universe: str, *, is_plane: bool, master: bool) -> None:
    """Encrypt new values of UNIVERSE with a new key. Older values stay readable, and keep their key until a rewrite."""
    with connect.open_plane() as plane:
        found = plane.encryption.rotate(_name(universe, is_plane=is_plane), master=master)
    done = "Wrapped the keys with the newest master key" if master else f"New values have key {found.keys}"
    printing.result(f"{done}: {found.universe or _PLANE}", _fields(found))


@encryption.command(examples=["fastness encryption rewrite shop", "fastness encryption rewrite --plane"])
@click.argument("universe", default="")
@click.option("--plane", "is_plane", is_flag=True, help="Rewrite what belongs to no universe.")
def rewrite(universe: str, *, is_plane: bool) -> None:
    """Encrypt older data of UNIVERSE with its newest key.

    Encrypts what has an older key or none.

    The plane can be used meanwhile. If the command is interrupted, run it again: it continues where it stopped. When
    it is complete, values that are not encrypted are refused.
    """
    name, values, objects = _name(universe, is_plane=is_plane), 0, 0
    with connect.open_plane() as plane, printing.progress("Values and objects") as advance:
        is_complete = False
        while not is_complete:
            done = plane.encryption.rewrite_some(name)
            values, objects, is_complete = values + done.values, objects + done.objects, done.is_complete
            advance(done.values + done.objects)
    text = f"Rewrote {values:,} values and {objects:,} objects of {name or _PLANE}; all of it has the newest key"
    printing.result(text, {"universe": name, "values": values, "objects": objects})


def _name(universe: str, *, is_plane: bool) -> str:
    if bool(universe) == is_plane:
        raise click.UsageError("Name a universe, or give --plane")
    return universe


def _row(found: UniverseEncryption) -> dict[str, Any]:
    left = "none" if found.all_newest else "of older keys" if found.all_encrypted else "not encrypted"
    return {
        **_fields(found),
        "universe": found.universe or _PLANE,
        "older_values": left,
    }
