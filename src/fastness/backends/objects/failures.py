"""Translates errors of obstore and the operating system to Fastness errors."""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from obstore import exceptions

from fastness.errors import (
    Backend,
    CommitUnknown,
    DiskFull,
    FastnessError,
    InvalidArgument,
    ObjectChanged,
    ObjectExists,
    ObjectNotFound,
    PathUnusable,
    Unreachable,
    Unsupported,
)
from fastness.panics import Panic, panics_as_errors


@contextmanager
def translate_errors(path: str, *, writes: bool = False) -> Iterator[None]:
    """Translate errors raised inside to Fastness errors about `path`. A write whose answer is lost is CommitUnknown."""
    try:
        with panics_as_errors():
            yield
    except (exceptions.BaseError, OSError, NotImplementedError, Panic) as error:
        raise object_error(_kind(error, writes=writes), path, cause=headline(error)) from error


def object_error(kind: type[FastnessError], path: str, *, cause: str = "") -> FastnessError:
    return kind(_MESSAGES[kind].format(path=repr(path), cause=cause))


def headline(error: Exception) -> str:
    """The error's text without obstore's debugging output."""
    return str(error).partition("\n\nDebug source")[0]


@contextmanager
def ignore_range_after_end() -> Iterator[None]:
    """Suppress a store's error for a range that starts after the object's end."""
    try:
        yield
    except exceptions.GenericError as error:
        if not re.search("StartTooLarge|416 Range Not Satisfiable", str(error)):
            raise


def _kind(error: Exception, *, writes: bool) -> type[FastnessError]:
    text = str(error)
    if re.search("NoSuchBucket|ContainerNotFound|specified bucket does not exist", text):
        return PathUnusable
    for types, kind in _BY_TYPE:
        if isinstance(error, types):
            return kind
    if no_answer := _NO_ANSWER.search(text):
        # A connection refused on the first attempt sent nothing; before a retry, an earlier attempt may have arrived.
        sent = no_answer["kind"] != "Connect" or no_answer["retries"] != "0"
        return CommitUnknown if writes and sent else Unreachable
    os_error = re.search(r"\(os error ([0-9]+)\)", text)
    number = getattr(error, "errno", None) or (int(os_error[1]) if os_error else 0)
    if number == errno.ENOTDIR and not writes:
        return ObjectNotFound
    return _BY_ERRNO.get(number, Backend)


# obstore distinguishes these errors only in its debug text.
_NO_ANSWER: Final = re.compile(
    r"retries: (?P<retries>[0-9]+),.*HttpError \{\s*kind: (?P<kind>Connect|Timeout|Request|Interrupted|Decode)",
    re.DOTALL,
)
_BY_TYPE: Final[tuple[tuple[Any, type[FastnessError]], ...]] = (
    (exceptions.AlreadyExistsError | FileExistsError, ObjectExists),
    (exceptions.PreconditionError, ObjectChanged),
    (FileNotFoundError, ObjectNotFound),
    (exceptions.PermissionDeniedError | exceptions.UnauthenticatedError, PathUnusable),
    (NotImplementedError, Unsupported),
)
_BY_ERRNO: Final[dict[int, type[FastnessError]]] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), DiskFull),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), PathUnusable),
    **dict.fromkeys((errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG), InvalidArgument),
}
_MESSAGES: Final[dict[type[FastnessError], str]] = {
    ObjectExists: "An object already exists at {path} and was not changed; read it, or choose another path",
    ObjectChanged: "The object at {path} has another version, or does not exist; read it, then decide",
    ObjectNotFound: "There is no object at {path}; check the path with list",
    PathUnusable: "The store refuses {path} ({cause}); check that its bucket or folder exists and that you may use it",
    Unsupported: "The store does not support this operation on {path} ({cause}); use another store",
    DiskFull: "The device has no space for {path} ({cause}); nothing was stored, free some space and repeat",
    InvalidArgument: "A local folder cannot store {path} ({cause}); choose another path",
    Unreachable: "The store does not answer about {path} ({cause}); nothing was written, check its endpoint and repeat",
    CommitUnknown: "The answer about {path} was lost ({cause}); the write may have succeeded, check before repeating",
    Backend: "The store failed at {path} ({cause}); repeat later",
}
