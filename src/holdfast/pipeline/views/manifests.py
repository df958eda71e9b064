"""Manifests of rotated session logs, read many at a time and remembered: there may be tens of thousands of them.

A manifest never changes, and has the hash of its file in its name.
"""

from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Final

from holdfast.backends.objects import ObjectStore
from holdfast.backends.objects.store import Page
from holdfast.errors import ObjectNotFound
from holdfast.limits import MANIFESTS_KNOWN_MAX, OBJECT_LIST_MAX, VIEW_OBJECTS_AT_ONCE

FOLDER: Final = "activity-manifest"


class Manifests(ObjectStore):
    """The manifests of a store, to be listed and read as in the store itself."""

    def __init__(self, objects: ObjectStore, name: str) -> None:
        """`name` tells the store from others, in other views too."""
        super().__init__(objects._store)
        self._objects = objects
        self._name = name

    def list(self, prefix: str = "", *, after: str | None = None, limit: int = OBJECT_LIST_MAX) -> Page:
        """A page of the listing. What is listed is read at once, because it is asked for next."""
        page = self._objects.list(prefix, after=after, limit=limit)
        unknown = [meta.path for meta in page if (self._name, meta.path) not in _known]
        if len(unknown) > 1:
            with ThreadPoolExecutor(VIEW_OBJECTS_AT_ONCE) as pool:
                for _ in pool.map(self._remember, unknown):
                    pass
        return page

    def get(self, path: str) -> bytes:
        known = _known.get((self._name, path))
        return known if known is not None else self._remember(path) or self._objects.get(path)

    def _remember(self, path: str) -> bytes | None:
        try:
            data = self._objects.get(path)
        except ObjectNotFound:
            return None
        with _lock:
            _known[self._name, path] = data
            while len(_known) > MANIFESTS_KNOWN_MAX:
                _known.popitem(last=False)
        return data


_known: Final[OrderedDict[tuple[str, str], bytes]] = OrderedDict()
_lock: Final = Lock()
