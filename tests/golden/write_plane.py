"""Writes the golden plane of this version's data format, and what is read from it.

python -m tests.golden.write_plane           both, for a new format
python -m tests.golden.write_plane --read    only what is read from the plane as it is, after the API has changed
"""

import hashlib
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import msgspec

import fastness
from fastness.kv.formats import FORMAT
from fastness.testing.clock import ManualClock
from tests.support.populated import everything, populate, use

FOLDER = Path(__file__).parent
PLANE = FOLDER / f"plane-format-{FORMAT}.tar.xz"
FOUND = PLANE.with_name(f"plane-format-{FORMAT}.json")
_TEXT_MAX = 100


def write() -> None:
    """Write the plane."""
    clock = ManualClock()
    with tempfile.TemporaryDirectory() as folder, tarfile.open(PLANE, "w:xz", preset=9) as archive:
        with fastness.open(f"dir:{folder}/data", clock=clock) as plane:
            populate(plane, clock)
        archive.add(Path(folder, "data"), "data", filter=_anonymous)


def read(folder: Path) -> dict[str, Any]:
    """Everything that the plane has, and what its use answers. It is unpacked into `folder`."""
    with tarfile.open(PLANE) as archive:
        archive.extractall(folder, filter="data")
    clock = ManualClock()
    with fastness.open(f"dir:{folder}/data", clock=clock) as plane:
        found = {**everything(plane), "used": use(plane, clock)}
    return {name: _short(value) for name, value in msgspec.json.decode(msgspec.json.encode(found)).items()}


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """A file without its owner and its time. RocksDB's log of what it did is left out."""
    if Path(member.name).name == "LOG":
        return None
    return member.replace(uid=0, gid=0, uname="", gname="", mtime=0, deep=False)


def _short(found: Any) -> Any:
    """The same with the hashes of long texts."""
    if isinstance(found, dict):
        return {name: _short(value) for name, value in found.items()}
    if isinstance(found, list):
        return [_short(value) for value in found]
    is_long = isinstance(found, str) and len(found) > _TEXT_MAX
    return hashlib.sha256(found.encode()).hexdigest() if is_long else found


if __name__ == "__main__":
    if sys.argv[1:] != ["--read"]:
        write()
    with tempfile.TemporaryDirectory() as unpacked:
        lines = (f'"{name}": {msgspec.json.encode(value).decode()}' for name, value in read(Path(unpacked)).items())
        FOUND.write_text("{\n" + ",\n".join(lines) + "\n}\n")
