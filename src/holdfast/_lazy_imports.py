"""Package exports that are imported on first access."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_exports(
    package: dict[str, Any], modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package with these globals. `modules` maps each name to its module."""

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}")
        found = package[name] = getattr(import_module(modules[name]), name)
        return found

    return find, lambda: sorted({*package, *modules})
