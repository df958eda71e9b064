"""The tree of errors is API: its names, its codes, and what a caller may do next."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fastness
from fastness import errors
from fastness.errors import Backend, FastnessError, MailboxFull, RetryAdvice, rebuild
from fastness.wire.problems import problem_of
from tests.support.failures import Failures

CLASSES: dict[str, Any] = {
    name: thing
    for name, thing in vars(errors).items()
    if inspect.isclass(thing) and issubclass(thing, BaseException) and thing.__module__ == errors.__name__
}


def drawn_parents() -> dict[str, str | None]:
    """Each class that the module's docstring draws, and the one it hangs from."""
    parents: dict[str, str | None] = {}
    branch: list[str] = []  # The last name drawn at each depth.
    for line in (errors.__doc__ or "").splitlines()[2:]:
        drawn = re.fullmatch(r"([│├└─ ]*)(\S.*)", line)
        assert drawn is not None
        stem, names = drawn.groups()
        depth = len(stem) // 4
        for name in re.split(r"\s{2,}", names)[0].split(", "):
            parents[name] = branch[depth - 1] if depth else None
            branch[depth:] = [name]
    return parents


def test_the_drawn_tree_is_the_tree() -> None:
    bases = {name: None if error is FastnessError else error.__base__.__name__ for name, error in CLASSES.items()}
    assert drawn_parents() == bases


def test_no_two_errors_share_a_code() -> None:
    codes = [error.code for error in CLASSES.values()]
    assert len(set(codes)) == len(codes)


def test_each_error_has_a_code_a_meaning_and_advice() -> None:
    failures = Failures()
    for error in CLASSES.values():
        with failures.of(error.__name__):
            assert issubclass(error, FastnessError)
            assert "code" in vars(error), "it has its parent's code"
            wanted = re.sub(r"(?<!^)(?=[A-Z])", "_", error.__name__).lower()
            assert error.code == {FastnessError: "error", MailboxFull: "queue_full"}.get(error, wanted)
            assert re.fullmatch(r"[A-Z`][^\n]*\.", vars(error)["__doc__"].split("\n\n")[0]), "it needs a sentence"
            assert isinstance(error.retry, RetryAdvice)
    failures.check()


def test_a_retry_is_its_word_on_the_wire() -> None:
    assert [str(retry) for retry in RetryAdvice] == ["never", "refresh", "later", "idempotent"]


def test_an_answer_becomes_an_error_of_this_package_although_an_application_has_a_subclass() -> None:
    class HostDied(Backend):
        """It has the code of its base."""

    assert HostDied.code == Backend.code
    assert type(rebuild(Backend.code, "no answer")) is Backend


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def test_a_title_says_no_more_than_what_all_places_have_in_common_that_raise_the_error(tmp_path: Path) -> None:
    """A title is that of the class; the detail is that of the place."""
    (tmp_path / "file").write_text("")
    calls: dict[str, Callable[[fastness.Plane], Any]] = {
        "A value has a type, a form or a depth that cannot be stored or read": lambda plane: plane.state("s").update(
            nested(200)
        ),
        "A batch or a list has more items or bytes than one call may have; split it": lambda plane: plane.queue(
            "jobs"
        ).put_many(range(300)),
        "A key, or a part of one, is longer than the limit that the message names": lambda plane: plane.collection(
            "notes"
        ).get("p", ("x" * 1_500,)),
        "A value is longer than the limit that the message names; store it as a blob": lambda plane: plane.state(
            "s"
        ).update("x" * 600_000),
        "A file or folder cannot be created, read or written, or not be used for this": lambda _: fastness.open(
            f"dir:{tmp_path / 'file'}"
        ),
    }
    failures = Failures()
    with fastness.open("memory:") as plane:
        for title, call in calls.items():
            with failures.of(title):
                with pytest.raises(FastnessError) as raised:
                    call(plane)
                assert problem_of(raised.value).title == title
    failures.check()
