"""Contexts: several servers by name, in a TOML file that only its user can read.

    $XDG_CONFIG_HOME/holdfast/contexts.toml

    current = "prod"

    [contexts.prod]
    url = "https://plane.example:9440"
    token = "…"

What is said closest to the command counts: flags, then the context that --context names, then HOLDFAST_*, then the
current context. The token of a context goes to the URL of that context and nowhere else.
"""

import json
import os
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from holdfast.cli import printing
from holdfast.cli.commands import Noun, given
from holdfast.errors import InvalidArgument, NotFound, PathUnusable
from holdfast.names import checked_name

DEFAULT_URL: Final = "http://127.0.0.1:9440"


class Context(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a context can say."""

    url: str | None = None
    token: str | None = None
    universe: str | None = None
    objects: str | None = None
    ca: str | None = None
    cert: str | None = None
    key: str | None = None


class Contexts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the file says."""

    current: str | None = None
    contexts: dict[str, Context] = msgspec.field(default_factory=dict)


FIELDS: Final = Context.__struct_fields__


def resolved(flags: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """What holds for a command: for each field, whatever says it closest to the command.

    Raises:
        NotFound: a context is named that there is not.
    """
    said = {name: environ[variable] for name in FIELDS if environ.get(variable := f"HOLDFAST_{name.upper()}")}
    explicit = flags.get("context")
    named = explicit or ("" if said.get("url") else environ.get("HOLDFAST_CONTEXT"))
    stored = load() if named or not (flags.get("url") or said.get("url")) else Contexts()
    name = named or stored.current
    chosen = msgspec.to_builtins(_named(stored, name)) if name else {}
    layers = [flags, chosen, said] if explicit else [flags, said, chosen]
    found = {field: next((layer[field] for layer in layers if layer.get(field)), None) for field in FIELDS}
    found["url"] = found["url"] or DEFAULT_URL
    if chosen.get("url") != found["url"]:
        # What a context knows of its own server is nobody else's business.
        for field in ("token", "cert", "key"):
            found[field] = flags.get(field) or said.get(field)
    return found


def path() -> Path:
    """Where the file is."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "holdfast" / "contexts.toml"


def load() -> Contexts:
    """What the file says; nothing if there is none.

    Raises:
        InvalidArgument: it says something that is not understood.
    """
    try:
        return msgspec.convert(tomllib.loads(path().read_text()), Contexts)
    except FileNotFoundError:
        return Contexts()
    except OSError as error:
        raise PathUnusable(f"{path()} cannot be read ({error.strerror}); make it readable, or remove it") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.MsgspecError) as error:
        raise InvalidArgument(f"{path()} is not understood ({error}); it knows: {', '.join(FIELDS)}") from error


def save(contexts: Contexts) -> None:
    """Write the file anew, whole or not at all."""
    try:
        path().parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, draft = tempfile.mkstemp(dir=path().parent, prefix=".contexts-")  # Only its user can read it.
        with os.fdopen(descriptor, "w") as file:
            file.write(_toml(contexts))
            file.flush()
            os.fsync(file.fileno())
        Path(draft).replace(path())
    except OSError as error:
        raise PathUnusable(f"{path()} cannot be written ({error.strerror}); make its folder writable") from error


def complete(_ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """The names of contexts, for a shell that completes one."""
    return [name for name in load().contexts if name.startswith(incomplete)]


@click.group(cls=Noun)
def context() -> None:
    """Several servers, by name."""


@context.command(examples=["holdfast context add prod --url https://plane.example:9440 --token hf_…"])
@click.argument("name")
@click.option("--use", is_flag=True, help="Make it the current one.")
def add(name: str, use: bool) -> None:
    """Remember the given --url, --token, --universe, --objects, --ca, --cert and --key as NAME."""
    name, stored = checked_name("context", name), load()
    said = {field: given()[field] for field in FIELDS if given().get(field)}
    if "url" not in said:
        raise InvalidArgument(f"Context {name} needs a URL; give --url, as in --url {DEFAULT_URL}")
    everyone = {**stored.contexts, name: Context(**said)}
    current = name if use or stored.current is None else stored.current
    save(Contexts(current, everyone))
    printing.done(f"Context {name} is {said['url']}; the current one is {current}", {"name": name, "current": current})


@context.command("list")
def list_() -> None:
    """All contexts. Tokens stay in the file."""
    stored = load()
    found = [
        {
            "name": name,
            "current": name == stored.current,
            "url": each.url,
            "universe": each.universe,
            "has_token": each.token is not None,
        }
        for name, each in sorted(stored.contexts.items())
    ]
    printing.rows(found, ("name", "current", "url", "universe", "has_token"), nothing="There is no context yet.")


@context.command()
@click.argument("name", shell_complete=complete)
def use(name: str) -> None:
    """Make NAME the current context."""
    stored = load()
    _named(stored, name)
    save(Contexts(name, stored.contexts))
    printing.done(f"The current context is {name}", {"current": name})


@context.command()
@click.argument("name", shell_complete=complete)
def remove(name: str) -> None:
    """Forget a context."""
    stored = load()
    _named(stored, name)
    others = {each: about for each, about in stored.contexts.items() if each != name}
    save(Contexts(None if stored.current == name else stored.current, others))
    printing.done(f"Context {name} is forgotten", {"removed": name})


def _named(stored: Contexts, name: str) -> Context:
    found = stored.contexts.get(name)
    if found is None:
        known = ", ".join(sorted(stored.contexts)) or "none yet"
        raise NotFound(f"There is no context {name} in {path()} (there is: {known}); add it with holdfast context add")
    return found


def _toml(contexts: Contexts) -> str:
    lines = [] if contexts.current is None else [f"current = {_text(contexts.current)}"]
    for name, each in sorted(contexts.contexts.items()):
        lines += ["", f"[contexts.{_text(name)}]"]
        lines += [f"{field} = {_text(value)}" for field, value in msgspec.to_builtins(each).items()]
    return "\n".join(lines) + "\n"


def _text(value: str) -> str:
    # A JSON string is a TOML string, but for the one control character that JSON leaves alone.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
