"""A loop over declarations that reports every failure at once."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


class Failures:
    """Collects the failures of the cases of one test; at the end, `check` fails with all of them.

    failures = Failures()
    for kind in REQUESTS:
        with failures.of(kind.__name__):
            assert kind.operation.http
    failures.check()
    """

    def __init__(self) -> None:
        self._cases = 0
        self._failures: list[tuple[str, BaseException]] = []

    @contextmanager
    def of(self, case: object) -> Iterator[None]:
        """Note the failure of a case, and continue with the next one."""
        self._cases += 1
        try:
            yield
        except (Exception, pytest.fail.Exception) as error:  # The second one is of `pytest.raises`.
            self._failures.append((_shown(case), error))

    def check(self) -> None:
        """Fail if a case has failed, or if there was none."""
        assert self._cases, "no case was tried"
        if self._failures:
            text = "\n".join(f"{case}: {type(error).__name__}: {error}" for case, error in self._failures)
            heading = f"{len(self._failures)} of {self._cases} cases failed"
            raise AssertionError(f"{heading}:\n{text}") from self._failures[0][1]


def _shown(case: object) -> str:
    """A case, shortened; a function by its name and the line that it is in."""
    if type(case) is tuple:  # A named one has a text of its own.
        return ", ".join(map(_shown, case))
    code = getattr(case, "__code__", None)
    return f"{case!s:.100}" if code is None else f"{code.co_name} in line {code.co_firstlineno}"
