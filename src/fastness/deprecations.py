"""Deprecations of the public API: what is deprecated still works, warns, and says what to use and until when.

    @deprecated("use queue.search", since="0.3", removed_in="0.5")
    def find(self, text: str) -> list[FoundMessage]: ...

docs/explanation/versions.md has the policy that the two versions follow.
"""

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


class FastnessDeprecationWarning(DeprecationWarning):
    """A name of Fastness will be removed.

    `warnings.simplefilter("error", fastness.FastnessDeprecationWarning)` makes its uses fail, in tests for example.
    """


def deprecated(
    instead: str, *, since: str, removed_in: str
) -> Callable[[Callable[Parameters, Returned]], Callable[Parameters, Returned]]:
    """Make a function or method warn at each place that calls it.

    Args:
        instead: what to do, as the end of a sentence: "use queue.search".
        since: the first version that warns, such as "0.3".
        removed_in: the first version without it: two minor versions later at least, or a later major version.

    Raises:
        ValueError: `removed_in` is too early.
    """
    first, last = _parsed(since), _parsed(removed_in)
    if last < (first[0], first[1] + 2):
        raise ValueError(
            f"What is deprecated since {since} works for two minor versions at least; "
            f"choose removed_in={first[0]}.{first[1] + 2} or later, not {removed_in}"
        )

    def mark(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
        text = f"{function.__qualname__} is deprecated since {since} and will be removed in {removed_in}; {instead}"

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def awaited(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Any:
                warnings.warn(text, FastnessDeprecationWarning, stacklevel=2)
                return await function(*args, **kwargs)

            return cast("Callable[Parameters, Returned]", awaited)

        @functools.wraps(function)
        def called(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
            warnings.warn(text, FastnessDeprecationWarning, stacklevel=2)
            return function(*args, **kwargs)

        return called

    return mark


def _parsed(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
