"""Valid object paths: those that every store supports."""

import re
from typing import Final

from fastness.errors import InvalidArgument
from fastness.limits import OBJECT_PATH_BYTES_MAX


def check_path(path: str) -> str:
    """Return `path` if every store supports it. A valid path stays below the store's root.

    Raises:
        InvalidArgument: the path is invalid; the message names the reason.
    """
    if _UNPRINTABLE.search(path):
        raise InvalidArgument(f"The path {path!r} has a control character or a lone surrogate; remove it")
    if (size := len(path.encode())) > OBJECT_PATH_BYTES_MAX:
        raise InvalidArgument(
            f"The path {path!r} has {size} bytes and may have {OBJECT_PATH_BYTES_MAX} (OBJECT_PATH_BYTES_MAX); shorten"
        )
    for segment in path.split("/"):
        if segment in ("", ".", ".."):
            raise InvalidArgument(f"The path {path!r} has the segment {segment!r}; write a relative path, like 'a/b'")
        if _STAGED.search(segment):
            raise InvalidArgument(f"The path {path!r} has a segment that ends in '#' and digits; choose another ending")
    return path


_UNPRINTABLE: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_STAGED: Final = re.compile(r"#[0-9]+\Z")  # obstore's local listing skips such names, which hides staged files.
