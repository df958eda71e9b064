"""Names that people give: universes, worlds, queues. Lower-cased once, here, at the edge."""

import re
from typing import Final

from holdfast.errors import InvalidName

UNIVERSE: Final = "main"  # The tenant of whoever names none.

_NAME: Final = re.compile(r"[a-z0-9._-]{1,128}\Z")


def checked_name(kind: str, name: object) -> str:
    """The name in lower case.

    Raises:
        InvalidName: it is no name.
    """
    if isinstance(name, str) and _NAME.match(lowered := name.lower()):
        return lowered
    raise InvalidName(f"{name!r} is no name for a {kind}; use 1 to 128 of a-z, 0-9, '.', '_' and '-'")
