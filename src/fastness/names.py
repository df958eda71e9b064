"""The one place that checks names: of universes, worlds, queues, agents, and the keys of leases and states.

A name is 1 to 255 letters, digits and `._@:+=-`, and keeps its case. A key of a lease or a state may join such names
with `/`, as in `orders/1234`. An address is `agent` or `agent@universe`, so the name of an agent has no `@`.
"""

import re
from pathlib import Path
from typing import Final

from fastness.errors import InvalidArgument, InvalidName, PathUnusable
from fastness.limits import NAME_BYTES_MAX, NAMES_CACHED_MAX, QUEUE_NAME_CHARACTERS_MAX

UNIVERSE: Final = "main"  # The tenant of callers that do not name one.
REPORTS: Final = "reports"  # The collection of reports, and its partition. A row is a JSON document; its key, the name.

# As JSON Schema has them. A name is neither "." nor "..".
NAME_PATTERN: Final = f"^(?!\\.{{1,2}}$)[A-Za-z0-9._@:+=-]{{1,{NAME_BYTES_MAX}}}$"
QUEUE_NAME_PATTERN: Final = f"^(?!\\.{{1,2}}$)[A-Za-z0-9._@:+=-]{{1,{QUEUE_NAME_CHARACTERS_MAX}}}(\\.dlq)?$"
KEY_PATTERN: Final = "^(?!\\.{1,2}(/|$))[A-Za-z0-9._@:+=-]+(/(?!\\.{1,2}(/|$))[A-Za-z0-9._@:+=-]+)*$"
_NAME: Final = re.compile(NAME_PATTERN.replace("$", r"\Z"))
_KEY: Final = re.compile(KEY_PATTERN.replace("$", r"\Z"))
_ALLOWED: Final = f"1 to {NAME_BYTES_MAX} letters (a-z, A-Z), digits and . _ @ : + = -"
known_names: Final[set[str]] = set()  # Names that passed the check: most calls use a name that was used before.


def checked_name(kind: str, name: object) -> str:
    """The name itself, unchanged.

    Raises:
        InvalidName: it is not a name.
    """
    if name.__class__ is str and name in known_names:
        return name
    if isinstance(name, str) and _NAME.match(name):
        if len(known_names) >= NAMES_CACHED_MAX:
            known_names.clear()
        known_names.add(name)
        return name
    label = kind if kind == "name" else f"{kind} name"
    raise InvalidName(f"Invalid {label} {_shown(name)}: use {_ALLOWED}, and neither '.' nor '..'")


def checked_queue_name(kind: str, name: object) -> str:
    """The name of a queue, unchanged. It leaves space for the suffix of a dead letter queue.

    Raises:
        InvalidName, InvalidArgument: it is not a name, or it is too long.
    """
    checked = checked_name(kind, name)
    if len(checked) > QUEUE_NAME_CHARACTERS_MAX and not checked.endswith(".dlq"):
        raise InvalidArgument(f"A queue's name has at most {QUEUE_NAME_CHARACTERS_MAX} characters, not {len(checked)}")
    return checked


def checked_key(kind: str, key: object) -> str:
    """The key of a lease or a state, unchanged: names joined by slashes, as in `orders/1234`.

    Raises:
        InvalidName: it is not a key.
    """
    if isinstance(key, str) and is_key(key):
        return key
    raise InvalidName(
        f"Invalid {kind} key {_shown(key)}: use {_ALLOWED}, with single slashes between parts, "
        f"{NAME_BYTES_MAX} characters in all"
    )


def checked_agent(address: object, universe: str) -> str:
    """The agent that an address names: `agent-7`, or `agent-7@universe`.

    Raises:
        InvalidName: it is not an address, or it is in another universe. Mail stays within its universe.
    """
    if not isinstance(address, str) or "@" not in address:
        return checked_name("agent", address)
    agent, _, home = address.partition("@")
    if checked_name("universe", home) != universe:
        raise InvalidName(
            f"{_shown(address)} is in universe {home}, not {universe}; mail stays within its universe, "
            "and the name of an agent has no '@'"
        )
    return checked_name("agent", agent)


def folder_at(named: str) -> Path:
    """The folder with this path or `dir:` URL; `~` and `~user` are expanded.

    Raises:
        PathUnusable: there is no such user.
    """
    path = named.removeprefix("dir:")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise PathUnusable(f"The path {path} cannot be expanded ({error}); write it in full") from error


def is_key(key: str) -> bool:
    """Whether a text is the key of a lease or a state."""
    return len(key) <= NAME_BYTES_MAX and _KEY.match(key) is not None


def _shown(value: object) -> str:
    """A rejected value, shortened: it may be of any length."""
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:299]}…"
