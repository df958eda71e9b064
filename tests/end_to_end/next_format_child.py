"""The next version of Fastness, as far as formats go: it knows one format more than this one, and writes a new record.

`fastness` commands, or `notes URL`: writes a note for each line of its input, and prints how each one is stored. A note
is `1:TEXT` in the older format and `2:TEXT` in the newer one; this version reads both.
"""

import sys

from fastness.kv import formats

formats.FORMAT += 1  # type: ignore[misc]  # Before any other module has read it.

import fastness  # noqa: E402
from fastness.cli.main import root  # noqa: E402
from fastness.kv import Subspace, Transaction  # noqa: E402

NOTES = Subspace("test-notes")


def write_note(tx: Transaction, name: str) -> str:
    stored = f"{formats.written_format(tx)}:{name}"
    tx.put(NOTES.key(name), stored.encode())
    return stored


def main() -> None:
    if sys.argv[1] != "notes":
        root.main(sys.argv[1:])
    with fastness.open(sys.argv[2]) as plane:
        for line in sys.stdin:
            print(plane.transact(write_note, line.strip()), flush=True)


main()
