"""Big bytes under a path: in memory, in a local folder, or in S3, Azure or Google Cloud through `obstore`.

    put      stores, over whatever is there        get, get_range   the bytes, or a slice of them
    create   stores only where nothing is          head, list       path, size and etag
    replace  stores only over the etag it names    open             the bytes, a part at a time
    write    `put` or `create` of a stream         delete           fine when nothing is there

What every store promises, and `holdfast.testing.conformance.objects` proves:

- An object is there whole or not at all; a body that fails half-way leaves what was there before.
- Of many who `create` one path, or `replace` one etag, exactly one wins.
- What has returned is as durable as the store is. obstore never syncs a local folder, so `FolderStore` does.
- `list` is in path order, and goes on from the last path of the page before.

Every operation has an async form, `<name>_async`. Paths are the same everywhere: relative, `/` between segments.
"""

from typing import Any

from obstore.exceptions import BaseError
from obstore.store import MemoryStore, from_url

from holdfast.backends.objects.failures import headline
from holdfast.backends.objects.folders import FolderStore
from holdfast.backends.objects.paths import check_path
from holdfast.backends.objects.store import ObjectMeta, ObjectStore
from holdfast.errors import InvalidArgument, InvalidUrl
from holdfast.names import folder_at

__all__ = ["open_objects", "ObjectStore", "FolderStore", "ObjectMeta", "check_path"]


def open_objects(url: str, **config: Any) -> ObjectStore:
    """Open `memory:`, `dir:PATH` (created when missing), `s3://bucket/prefix`, `az://...` or `gs://bucket/prefix`.

    Credentials and endpoints come from the environment (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT`, ...) or from `config`,
    which goes to obstore's `from_url` as it is. Nothing is asked of a remote store before its first use.

    Raises:
        InvalidUrl: the scheme is unknown, or the rest of the URL and the configuration make no store.
        InvalidArgument: there is configuration for a store that takes none.
        PathUnusable: the folder cannot be created or written.
    """
    scheme, _, rest = url.partition(":")
    if scheme in ("memory", "dir") and config:
        raise InvalidArgument(f"A store at {scheme}: takes no configuration; remove {', '.join(sorted(config))}")
    if url == "memory:":
        return ObjectStore(MemoryStore())
    if scheme == "dir" and rest:
        return FolderStore(folder_at(rest))
    if scheme in ("s3", "az", "gs"):
        try:
            return ObjectStore(from_url(url, **config))
        except (BaseError, ValueError, TypeError) as error:
            raise InvalidUrl(
                f"The URL {url!r} opens no object store ({headline(error)}); correct it or its options"
            ) from error
    raise InvalidUrl(f"The URL {url!r} names no object store; use memory:, dir:PATH, s3://, az:// or gs://")
