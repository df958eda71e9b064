"""A cache of the manifests of rotated session logs, which reads many at a time: there may be tens of thousands.

A manifest never changes, and has the hash of its file in its name.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from threading import Lock
from typing import Final

from fastness.backends.objects import ObjectStore
from fastness.errors import ObjectNotFound
from fastness.limits import MANIFESTS_CACHED_MAX, OBJECT_LIST_MAX, VIEW_OBJECTS_IN_FLIGHT

FOLDER: Final = "activity-manifest"


class Manifests(ObjectStore):
    """An object store whose manifests are cached."""

    def __init__(self, objects: ObjectStore, name: str) -> None:
        """Wrap a store; `name` identifies it across views."""
        super().__init__(objects._store)
        self._objects = objects
        self._name = name

    def fetched(self, paths: Iterable[str]) -> Iterator[str]:
        """The same paths. Their objects are fetched in groups, because they are read next."""
        rest = iter(paths)
        while group := list(islice(rest, OBJECT_LIST_MAX)):
            uncached = [path for path in group if (self._name, path) not in _cache]
            if len(uncached) > 1:
                with ThreadPoolExecutor(VIEW_OBJECTS_IN_FLIGHT) as pool:
                    for _ in pool.map(self._fetch, uncached):
                        pass
            yield from group

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
