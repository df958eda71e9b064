"""A cache of the manifests of rotated session logs, which reads many at a time: there may be tens of thousands.

A manifest never changes, and has the hash of its file in its name.
"""

from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Final

from holdfast.backends.objects import ObjectStore
from holdfast.backends.objects.store import Page
from holdfast.errors import ObjectNotFound
from holdfast.limits import MANIFESTS_CACHED_MAX, OBJECT_LIST_MAX, VIEW_OBJECTS_IN_FLIGHT

FOLDER: Final = "activity-manifest"


class Manifests(ObjectStore):
    """An object store whose manifests are cached."""

    def __init__(self, objects: ObjectStore, name: str) -> None:
        """Wrap a store; `name` identifies it across views."""
        super().__init__(objects._store)
        self._objects = objects
        self._name = name

    def list(self, prefix: str = "", *, after: str | None = None, limit: int = OBJECT_LIST_MAX) -> Page:
        """A page of the listing. Its objects are fetched at once, because they are read next."""
        page = self._objects.list(prefix, after=after, limit=limit)
        uncached = [meta.path for meta in page if (self._name, meta.path) not in _cache]
        if len(uncached) > 1:
            with ThreadPoolExecutor(VIEW_OBJECTS_IN_FLIGHT) as pool:
                for _ in pool.map(self._fetch, uncached):
                    pass
        return page

    def get(self, path: str) -> bytes:
        known = _cache.get((self._name, path))
        return known if known is not None else self._fetch(path) or self._objects.get(path)

    def _fetch(self, path: str) -> bytes | None:
        try:
            data = self._objects.get(path)
        except ObjectNotFound:
            return None
        with _cache_lock:
            _cache[self._name, path] = data
            while len(_cache) > MANIFESTS_CACHED_MAX:
                _cache.popitem(last=False)
        return data


_cache: Final[OrderedDict[tuple[str, str], bytes]] = OrderedDict()
_cache_lock: Final = Lock()
