"""The file of saved contexts: several servers by name, in a TOML file that only its user can read.

    $XDG_CONFIG_HOME/fastness/contexts.toml

    current = "prod"

    [contexts.prod]
    url = "https://plane.example:9440"
    token = "…"

The first of these that sets a field wins: flags, the context given by --context, FASTNESS_* variables, the current
context. The token of a context is sent to the URL of that context only.
"""

import json
import os
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from fastness.errors import InvalidArgument, NotFound, PathUnusable
from fastness.folders import make_folder, sync_folder

DEFAULT_URL: Final = "http://127.0.0.1:9440"


class Context(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The settings of one context."""

    url: str | None = None
    token: str | None = None
    universe: str | None = None
    objects: str | None = None
    ca: str | None = None
    cert: str | None = None
    key: str | None = None


class Contexts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The contents of the file."""

    current: str | None = None
    contexts: dict[str, Context] = msgspec.field(default_factory=dict)


FIELDS: Final = Context.__struct_fields__


def resolve(flags: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Where the plane is, from flags, the environment and the selected context.

    The command line, `connect` without a URL and task apps without a URL all ask this.

    Raises:
        NotFound: the selected context does not exist.
    """
    from_environment = {
        name: environ[variable] for name in FIELDS if environ.get(variable := f"FASTNESS_{name.upper()}")
    }
    explicit = flags.get("context")
    named = explicit or ("" if from_environment.get("url") else environ.get("FASTNESS_CONTEXT"))
    stored = load() if named or not (flags.get("url") or from_environment.get("url")) else Contexts()
    name = named or stored.current
    context = msgspec.to_builtins(named_context(stored, name)) if name else {}
    sources = [flags, context, from_environment] if explicit else [flags, from_environment, context]
    found = {field: next((source[field] for source in sources if source.get(field)), None) for field in FIELDS}
    found["url"] = found["url"] or DEFAULT_URL
    if context.get("url") != found["url"]:
        # The credentials of a context must not be sent to another server.
        for field in ("token", "cert", "key"):
            found[field] = flags.get(field) or from_environment.get(field)
    return found


def path() -> Path:
    """The path of the file."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "fastness" / "contexts.toml"


def load() -> Contexts:
    """The contents of the file; empty if it does not exist.

    Raises:
        InvalidArgument: the file is invalid.
    """
    try:
        return msgspec.convert(tomllib.loads(path().read_text()), Contexts)
    except FileNotFoundError:
        return Contexts()
    except OSError as error:
        raise PathUnusable(f"Cannot read {path()} ({error.strerror}); make it readable, or remove it") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.MsgspecError, RecursionError) as error:
        raise InvalidArgument(
            f"{path()} is invalid ({error}); a context has these fields: {', '.join(FIELDS)}"
        ) from error


def save(contexts: Contexts) -> None:
    """Replace the file atomically."""
    try:
        make_folder(path().parent)
        descriptor, temporary = tempfile.mkstemp(dir=path().parent, prefix=".contexts-")  # Only its user can read it.
        with os.fdopen(descriptor, "w") as file:
            file.write(_toml(contexts))
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path())
        sync_folder(path().parent)
    except OSError as error:
        raise PathUnusable(f"Cannot write {path()} ({error.strerror}); make its folder writable") from error


def named_context(stored: Contexts, name: str) -> Context:
    """The context `name`. Raises NotFound if it does not exist."""
    found = stored.contexts.get(name)
    if found is None:
        known = ", ".join(sorted(stored.contexts)) or "none yet"
        raise NotFound(
            f"No context {name} in {path()} (known: {known}); add it with: fastness context add {name} --url URL"
        )
    return found


def _toml(contexts: Contexts) -> str:
    lines = [] if contexts.current is None else [f"current = {_toml_string(contexts.current)}"]
    for name, each in sorted(contexts.contexts.items()):
        lines += ["", f"[contexts.{_toml_string(name)}]"]
        lines += [f"{field} = {_toml_string(value)}" for field, value in msgspec.to_builtins(each).items()]
    return "\n".join(lines) + "\n"


def _toml_string(value: str) -> str:
    # A JSON string is a valid TOML string, except for DEL, which JSON does not escape.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
