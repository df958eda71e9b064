"""What a package exports, imported when it is first used."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def lazy_exports(
    package: str, exports: Mapping[str, str]
) -> tuple[dict[str, str], Callable[[str], object], Callable[[], list[str]]]:
    """The module of each exported name, and the `__getattr__` and `__dir__` of the package.

    `exports` has the names of each module, separated by spaces.
    """
    module_of = {name: f"{package}.{module}" for module, names in exports.items() for name in names.split()}

    def get(name: str) -> object:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found: object = getattr(import_module(module_of[name]), name)
        setattr(sys.modules[package], name, found)
        return found

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of})

    return module_of, get, names
