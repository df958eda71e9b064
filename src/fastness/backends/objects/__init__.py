"""Objects under paths: in memory, in a local folder, or in S3, Azure or Google Cloud through `obstore`.

    put      stores, replacing any object          get, get_range   the bytes, or a slice of them
    create   stores only if there is no object     head, list       path, size and etag
    replace  stores only over a given etag         open             the bytes, one part at a time
    write    `put` or `create` of a stream         delete           succeeds if there is no object

What every store guarantees, and `fastness.testing.conformance.objects` tests:

- Writes are atomic; a body that fails half-way leaves the previous object.
- Of concurrent `create` calls for one path, or `replace` calls for one etag, exactly one succeeds.
- A write that returned is as durable as the store is. obstore never syncs a local folder, so `FolderStore` does.
- `list` is in path order, and continues after the last path of the previous page.

What event loops use has an async form, `<name>_async`: put, write, get, open, head and delete. Paths are the same
everywhere: relative, `/` between segments.
"""

from typing import Any

from obstore.exceptions import BaseError
from obstore.store import MemoryStore, from_url

from fastness.backends.objects.failures import headline
from fastness.backends.objects.folders import FolderStore
from fastness.backends.objects.paths import check_path
from fastness.backends.objects.store import ObjectMeta, ObjectStore
from fastness.errors import InvalidArgument, InvalidUrl
from fastness.names import folder_at

__all__ = ["open_objects", "ObjectStore", "FolderStore", "ObjectMeta", "check_path"]


def open_objects(url: str, **config: Any) -> ObjectStore:
    """Open `memory:`, `dir:PATH` (created when missing), `s3://bucket/prefix`, `az://...` or `gs://bucket/prefix`.

    Credentials and endpoints come from the environment (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT`, ...) or from `config`,
    which is passed to obstore's `from_url`. A remote store is not contacted before its first use.

    Raises:
        InvalidUrl: the scheme is unknown, or the URL and the configuration are not valid together.
        InvalidArgument: configuration was given for a store that takes none.
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
                f"The URL {url!r} is not a valid object store ({headline(error)}); correct it or its options"
            ) from error
    raise InvalidUrl(f"The URL {url!r} is not an object store; use memory:, dir:PATH, s3://, az:// or gs://")
