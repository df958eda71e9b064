"""Names that people give: universes, worlds, queues, keys, lower-cased once, here, at the edge; and folders."""

import re
from pathlib import Path
from typing import Final

from holdfast.errors import InvalidName, PathUnusable
from holdfast.limits import KEY_NAME_CHARACTERS_MAX, NAMES_KNOWN_MAX

UNIVERSE: Final = "main"  # The tenant of whoever names none.

_NAME: Final = re.compile(r"[a-z0-9._-]{1,128}\Z")
_known: Final[set[str]] = set()  # Names that were found to be good: most calls name what others named before.


def checked_name(kind: str, name: object) -> str:
    """The name in lower case.

    Raises:
        InvalidName: it is no name.
    """
    if isinstance(name, str) and name.isascii():  # Or the kelvin sign would be a k.
        if name in _known:
            return name
        lowered = name.lower()
        if _NAME.match(lowered):
            if len(_known) >= NAMES_KNOWN_MAX:
                _known.clear()
            _known.add(lowered)
            return lowered
    raise InvalidName(f"{name!r} is no name for a {kind}; use 1 to 128 of a-z, 0-9, '.', '_' and '-'")


def checked_key(kind: str, key: object) -> str:
    """The key of a lease or a state in lower case: names joined by slashes, as in `orders/1234`.

    Raises:
        InvalidName: it is no key.
    """
    if isinstance(key, str) and key.isascii() and len(key) <= KEY_NAME_CHARACTERS_MAX:
        lowered = key.lower()
        if _NAME.match(lowered) or all(_NAME.match(part) for part in lowered.split("/")):
            return lowered
    raise InvalidName(
        f"{key!r} is no key of a {kind}; join names of 1 to 128 of a-z, 0-9, '.', '_' and '-' by '/', "
        f"{KEY_NAME_CHARACTERS_MAX} characters in all"
    )


def checked_agent(address: object, universe: str) -> str:
    """The agent that an address names, in lower case: `agent-7`, or `agent-7@universe`.

    Raises:
        InvalidName: it is no address, or one of another universe. Mail does not leave its universe.
    """
    if not isinstance(address, str) or "@" not in address:
        return checked_name("agent", address)
    agent, _, home = address.partition("@")
    if checked_name("universe", home) != universe:
        raise InvalidName(f"{address} is in another universe than {universe}, and mail does not leave its universe")
    return checked_name("agent", agent)


def folder_at(named: str) -> Path:
    """The folder of that name, or of that dir: URL, with `~` as whose home it is.

    Raises:
        PathUnusable: there is no such user.
    """
    path = named.removeprefix("dir:")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise PathUnusable(f"{path} names no folder ({error}); write the whole path") from error
