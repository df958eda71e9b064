"""The backends that tests run on."""

from typing import Any, Final

import pytest

BACKENDS: Final = ("memory", "rocksdb", "postgres")


def rotating_backends(always: str) -> list[Any]:
    """The backends as parameters, for tests of what does not depend on them: one runs always, and the others rotate."""
    return [pytest.param(name, marks=() if name == always else pytest.mark.rotating) for name in BACKENDS]
