"""Signatures: error messages without their variable parts, so that errors of one cause form one group.

KeyError: 'user-4711' in /srv/app/worker.py line 31      KeyError: 'user-<n>' in <path> line <n>
"""

import re
from typing import Final

from fastness.limits import LAST_ERROR_BYTES_MAX, SIGNATURE_CHARACTERS_MAX

NO_ERROR: Final = "(no error was told)"


def signature(error: str | None) -> str:
    """The error without its variable parts."""
    line = _message_line(error or "")[
        :LAST_ERROR_BYTES_MAX
    ]  # Logs may have longer errors, and the pattern below is slow.
    if not line:
        return NO_ERROR
    return _VARIABLE_PARTS.sub(_placeholder, line)[:SIGNATURE_CHARACTERS_MAX].rstrip()


def _message_line(error: str) -> str:
    """The line with the message: the last one of a traceback, otherwise the first."""
    lines = [" ".join(line.split()) for line in error.splitlines()]
    lines = [line for line in lines if line]
    if not lines:
        return ""
    return lines[-1] if lines[0].startswith("Traceback (most recent call last)") else lines[0]


def _placeholder(found: re.Match[str]) -> str:
    return f"<{found.lastgroup}>"


# The first alternative wins. Nothing here matches across a <name>, so a signature is its own signature.
_VARIABLE_PARTS: Final = re.compile(
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
