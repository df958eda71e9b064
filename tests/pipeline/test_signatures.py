"""Errors of one cause have one signature."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastness.limits import LAST_ERROR_BYTES_MAX, SIGNATURE_CHARACTERS_MAX
from fastness.pipeline.signatures import NO_ERROR, signature


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("KeyError: 'user-4711' in /srv/app/worker.py line 31", "KeyError: 'user-<n>' in <path> line <n>"),
        ("no message 0192f3c4-7a1b-7cde-8f00-0123456789ab here", "no message <id> here"),
        ("GET https://api.example.com/v1/users/17?x=1 gave 503", "GET <url> gave <n>"),
        ("object at 0x7f3a2c, commit 9fceb02d", "object at <hex>, commit <hex>"),
        ("10.0.0.17:5432 refused the connection", "<ip> refused the connection"),
        ("took 1,250.75 s, 3 of 5", "took <n> s, <n> of <n>"),
        ("at 2026-11-15T11:13:52.123Z and on 2026-11-16", "at <time> and on <time>"),
        (r"cannot open C:\Users\ada\x.txt", "cannot open <path>"),
        ("no src/app/main.py", "no <path>"),
        ("either/or is no path, input/output error neither", "either/or is no path, input/output error neither"),
        (
            "The lease of worker-3f2a ended before it was settled",
            "The lease of worker-<hex> ended before it was settled",
        ),
        ("  two\t spaces  ", "two spaces"),
        ("first line\nsecond line", "first line"),
        ('Traceback (most recent call last):\n  File "/a/b.py", line 3\nValueError: bad 7\n', "ValueError: bad <n>"),
        ("token 01ARZ3NDEKTSV4RRFFQ69G5FAV is gone", "token <id> is gone"),
        ("facade, decade, deadbeef: words stay words", "facade, decade, deadbeef: words stay words"),
        ("", NO_ERROR),
        (None, NO_ERROR),
        (" \n ", NO_ERROR),
    ],
)
def test_variable_parts_are_replaced(error: str | None, expected: str) -> None:
    assert signature(error) == expected


@given(
    st.integers(0), st.uuids(), st.from_regex(r"(/[a-z]{1,8}){2,5}\.py", fullmatch=True), st.integers(1 << 28, 1 << 60)
)
def test_errors_that_differ_in_variable_parts_have_one_signature(
    number: int, id: object, path: str, address: int
) -> None:
    found = signature(f"step {number} of {id} failed in {path} at {address:#x}")
    assert found == "step <n> of <id> failed in <path> at <hex>"


@given(st.text() | st.from_regex(r"[a-f0-9/.:\- x\\'<>]*", fullmatch=True))
def test_signature_is_idempotent(error: str) -> None:
    found = signature(error)
    assert 0 < len(found) <= SIGNATURE_CHARACTERS_MAX
    assert signature(found) == found


def test_long_errors_are_truncated() -> None:
    assert signature("7" * LAST_ERROR_BYTES_MAX + " behind") == "<n>"
    assert signature("a-" * 500_000) == ("a-" * 500_000)[:SIGNATURE_CHARACTERS_MAX]
