"""`holdfast blob`: bytes that are named by what they are."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import click

from holdfast.cli import connect, printing, values
from holdfast.cli.commands import Noun
from holdfast.errors import BlobNotFound, PathUnusable


@click.group(cls=Noun)
def blob() -> None:
    """Bytes that are named by their SHA-256."""


@blob.command(examples=["holdfast blob put report.pdf", "tar c . | holdfast blob put -"])
@click.argument("file")
def put(file: str) -> None:
    """Store a file, or standard input for -; prints the hash that names it."""
    with ExitStack() as stack:
        stream = stack.enter_context(values.source(None, file))
        plane = stack.enter_context(connect.opened())
        advance = stack.enter_context(printing.progress("Bytes", _size(stream)))

        def counted() -> Iterator[bytes]:
            for piece in values.chunks(stream):
                yield piece
                advance(len(piece))

        hash = plane.blobs.write(counted())
    printing.done(hash, {"hash": hash})


@blob.command(examples=["holdfast blob get 9f86d0… --out report.pdf", "holdfast blob get 9f86d0… --length 100"])
@click.argument("hash")
@click.option(
    "--out", metavar="PATH", help="Write to a file, which appears when it is whole.  [default: standard output]"
)
@click.option("--start", type=click.IntRange(0), default=0, help="Begin at this byte.  [default: 0]")
@click.option("--length", type=click.IntRange(0), help="So many bytes, at most.  [default: all]")
def get(hash: str, out: str | None, start: int, length: int | None) -> None:
    """The bytes of a blob, or some of them: only those are read."""
    with connect.opened() as plane:
        pieces = plane.blobs.open(hash, start=start, length=length)
        if out is None:
            for piece in pieces:
                sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
            return
        size = _write(Path(out), pieces)
    printing.done(f"{size:,} bytes are in {out}", {"hash": hash, "path": out, "size": size})


@blob.command()
@click.argument("hash")
def has(hash: str) -> None:
    """Whether a blob is stored; exit code 4 says that it is not."""
    with connect.opened() as plane:
        if not plane.blobs.has(hash):
            raise BlobNotFound(f"No blob {hash} is stored in {plane.universe}")
    printing.done("yes", {"hash": hash, "stored": True})


def _size(stream: IO[bytes]) -> int | None:
    try:
        return os.fstat(stream.fileno()).st_size or None
    except OSError:
        return None


def _write(path: Path, pieces: Iterator[bytes]) -> int:
    draft, size = path.with_name(f".{path.name}.{os.getpid()}"), 0
    try:
        with draft.open("xb") as file, printing.progress("Bytes") as advance:
            for piece in pieces:
                size += file.write(piece)
                advance(len(piece))
        draft.replace(path)
    except OSError as error:
        raise PathUnusable(f"{path} cannot be written ({error.strerror}); name another file") from error
    finally:
        draft.unlink(missing_ok=True)
    return size
