"""Names of a package that are loaded when somebody asks for them."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(package: dict[str, Any], homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package with these globals; `homes` says in which module each name is."""

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}")
        found = package[name] = getattr(import_module(homes[name]), name)
        return found

    return find, lambda: sorted({*package, *homes})
