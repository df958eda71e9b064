"""Signatures: an error without what differs from one message to the next, so that errors of one cause are one group.

KeyError: 'user-4711' in /srv/app/worker.py line 31      KeyError: 'user-<n>' in <path> line <n>
"""

import re
from typing import Final

from holdfast.limits import LAST_ERROR_BYTES_MAX, SIGNATURE_CHARACTERS_MAX

NO_ERROR: Final = "(no error was told)"


def signature(error: str | None) -> str:
    """What is common to errors like this one."""
    line = _line(error or "")[:LAST_ERROR_BYTES_MAX]  # Logs may tell more, and what looks for addresses in it is slow.
    if not line:
        return NO_ERROR
    return _WHAT_DIFFERS.sub(_name, line)[:SIGNATURE_CHARACTERS_MAX].rstrip()


def _line(error: str) -> str:
    """The line that says what is wrong: the last one of a traceback, the first one of anything else."""
    lines = [" ".join(line.split()) for line in error.splitlines()]
    lines = [line for line in lines if line]
    if not lines:
        return ""
    return lines[-1] if lines[0].startswith("Traceback (most recent call last)") else lines[0]


def _name(found: re.Match[str]) -> str:
    return f"<{found.lastgroup}>"


# What comes first wins. Nothing here matches across a <name>, so a signature is its own signature.
_WHAT_DIFFERS: Final = re.compile(
    r"""
      (?P<url> \b[A-Za-z][A-Za-z0-9+.-]*://[^\s'"<>()\[\]{},;]+ )
    | (?P<time> (?<![0-9A-Za-z>]) \d{4}-\d\d-\d\d
        (?: [T\ ] \d\d:\d\d (?: :\d\d (?:[.,]\d+)? )? (?: Z | [+-]\d\d:?\d\d )? )? (?![0-9A-Za-z<]) )
    | (?P<id> (?<![0-9A-Za-z>]) [0-9a-fA-F]{8} (?:-[0-9a-fA-F]{4}){3} -[0-9a-fA-F]{12} (?![0-9A-Za-z<])
      | (?<![0-9A-Za-z>]) (?=[A-Za-z]*\d) (?=\d*[A-Za-z]) [0-9A-Za-z]{20,} )
    | (?P<path> (?<![\w.~/\\>-]) (?: [A-Za-z]:\\[^\s'"<>|:]+ | [\w.~-]* (?:/[\w.@+~-]+){2,} /? | /[\w.@+~-]+ /? ) )
    | (?P<hex> (?<![0-9A-Za-z>])
        (?: 0[xX][0-9a-fA-F]+ | (?=[a-fA-F]*\d) (?=\d*[a-fA-F]) [0-9a-fA-F]{4,} ) (?![0-9A-Za-z<]) )
    | (?P<ip> (?<![\w.>]) \d{1,3} (?:\.\d{1,3}){3} (?::\d+)? (?![\w]) )
    | (?P<n> \d+ (?:[.,_]\d+)* )
    """,
    re.VERBOSE,
)
