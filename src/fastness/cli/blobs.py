"""`fastness blob`: immutable bytes, addressed by their SHA-256 hash."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import click

from fastness.cli import connect, printing, values
from fastness.cli.commands import CommandGroup
from fastness.cli.operations import operation
from fastness.errors import BlobNotFound, PathUnusable
from fastness.wire.blobs import PinBlob

blob = CommandGroup()


@blob.command(
    examples=[
        "fastness blob put report.pdf",
        "tar c . | fastness blob put -",
        "fastness blob put part.bin --unpinned      # then put a message or a state that names its hash",
    ]
)
@click.argument("file")
@click.option(
    "--unpinned",
    is_flag=True,
    help="Delete it some time after no message, world, state or other data names its hash. By default it is pinned.",
)
def put(file: str, unpinned: bool) -> None:
    """Store a file, or standard input for -. Prints the blob's hash.

    The blob is pinned: it stays until it is unpinned and nothing names it. The same content is stored once, and stays
    pinned if it was put with a pin before.
    """
    with ExitStack() as stack:
        stream = stack.enter_context(values.open_input(None, file))
        plane = stack.enter_context(connect.open_plane(create=True))
        advance = stack.enter_context(printing.progress("Bytes", _size(stream)))

        def count_bytes() -> Iterator[bytes]:
            for chunk in values.read_chunks(stream):
                yield chunk
                advance(len(chunk))

        hash = plane.blobs.write(count_bytes(), pinned=not unpinned)
    printing.result(hash, {"hash": hash})


@blob.command(examples=["fastness blob get 9f86d0… --out report.pdf", "fastness blob get 9f86d0… --length 100"])
@click.argument("hash")
@click.option(
    "--out", metavar="PATH", help="Write to a file, which appears when it is complete.  [default: standard output]"
)
@click.option("--start", type=click.IntRange(0), default=0, help="Start at this byte.  [default: 0]")
@click.option("--length", type=click.IntRange(0), help="The maximum number of bytes.  [default: all]")
def get(hash: str, out: str | None, start: int, length: int | None) -> None:
    """Read a blob, or a range of it."""
    with connect.open_plane() as plane:
        chunks = plane.blobs.open(hash, start=start, length=length)
        if out is None:
            for chunk in chunks:
                sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
            return
        size = _write(Path(out), chunks)
    printing.result(f"Wrote {size:,} bytes to {out}", {"hash": hash, "path": out, "size": size})


@blob.command()
@click.argument("hash")
def has(hash: str) -> None:
    """Check whether a blob is stored. Exit code 4 means that it is not."""
    with connect.open_plane() as plane:
        if not plane.blobs.has(hash):
            raise BlobNotFound(f"Blob {hash} is not stored in universe {plane.universe}")
    printing.result("yes", {"hash": hash, "stored": True})


operation(
    blob,
    "pin",
    PinBlob,
    "Pinned: {hash} is kept until it is unpinned",
    show=lambda _: {"pinned": True},
    given={"pinned": True},
    examples=["fastness blob pin 9f86d0…"],
)
operation(
    blob,
    "unpin",
    PinBlob,
    "Unpinned: {hash} is kept while something names it, and for the grace period (gc_grace_seconds) after that",
    show=lambda _: {"pinned": False},
    given={"pinned": False},
    examples=["fastness blob unpin 9f86d0…", "fastness gc --dry-run      # is it still named?"],
)


def _size(stream: IO[bytes]) -> int | None:
    try:
        return os.fstat(stream.fileno()).st_size or None
    except OSError:
        return None


def _write(path: Path, chunks: Iterator[bytes]) -> int:
    temporary, size = path.with_name(f".{path.name}.{os.getpid()}"), 0
    try:
        with temporary.open("xb") as file, printing.progress("Bytes") as advance:
            for chunk in chunks:
                size += file.write(chunk)
                advance(len(chunk))
        temporary.replace(path)
    except OSError as error:
        raise PathUnusable(f"Cannot write {path} ({error.strerror}); choose another file") from error
    finally:
        temporary.unlink(missing_ok=True)
    return size
