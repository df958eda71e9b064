"""The Python modules of users that `fastness worker` and `fastness host` run."""

import importlib
import logging
import os
import sys
from types import ModuleType

from fastness.errors import InvalidArgument


def load_module(name: str) -> ModuleType:
    """A module, imported from the current folder or PYTHONPATH.

    Raises:
        InvalidArgument: it cannot be imported.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise InvalidArgument(
                f"There is no module {name}; run the command in its folder, or set PYTHONPATH"
            ) from error
        logging.getLogger("fastness.cli").error("module %s cannot be imported", name, exc_info=error)
        raise InvalidArgument(f"Module {name} cannot be imported: {type(error).__name__}: {error}") from error
