"""The one place that checks names: of universes, worlds, queues, agents, and the keys of leases and states.

A name is 1 to 255 letters, digits and `._@:+=-`, and keeps its case. A key of a lease or a state may join such names
with `/`, as in `orders/1234`. An address is `agent` or `agent@universe`, so the name of an agent has no `@`.
"""

import re
from pathlib import Path
from typing import Final

from fastness.errors import InvalidName, PathUnusable
from fastness.limits import NAME_BYTES_MAX, NAMES_CACHED_MAX

UNIVERSE: Final = "main"  # The tenant of callers that do not name one.
REPORTS: Final = "reports"  # The collection of reports, and its partition. A row is a JSON document; its key, the name.

_ALLOWED: Final = f"1 to {NAME_BYTES_MAX} letters (a-z, A-Z), digits and . _ @ : + = -"
_NAME: Final = re.compile(rf"(?!\.{{1,2}}\Z)[A-Za-z0-9._@:+=-]{{1,{NAME_BYTES_MAX}}}\Z")  # Neither "." nor "..".
_known: Final[set[str]] = set()  # Names that passed the check: most calls use a name that was used before.


def checked_name(kind: str, name: object) -> str:
    """The name itself, unchanged.

    Raises:
        InvalidName: it is not a name.
    """
    if name.__class__ is str and name in _known:
        return name
    if isinstance(name, str) and _NAME.match(name):
        if len(_known) >= NAMES_CACHED_MAX:
            _known.clear()
        _known.add(name)
        return name
    raise InvalidName(f"Invalid {kind} name {_shown(name)}: use {_ALLOWED}, and neither '.' nor '..'")


def checked_key(kind: str, key: object) -> str:
    """The key of a lease or a state, unchanged: names joined by slashes, as in `orders/1234`.

    Raises:
        InvalidName: it is not a key.
    """
    if isinstance(key, str) and (key in _known or _is_key(key)):
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


def _is_key(key: str) -> bool:
    return len(key) <= NAME_BYTES_MAX and all(_NAME.match(part) for part in key.split("/"))


def _shown(value: object) -> str:
    """A rejected value, shortened: it may be of any length."""
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:299]}…"
