"""Writes the golden plane of this version's data format again, with what it has and what its use answers:

python tests/golden/write_plane.py
"""

import runpy
import tarfile
import tempfile
from pathlib import Path

import msgspec

import fastness
from fastness.kv.formats import FORMAT
from fastness.testing.clock import ManualClock

FOLDER = Path(__file__).parent


def main() -> None:
    populated = runpy.run_path(str(FOLDER.parent / "populated.py"))
    clock = ManualClock()
    path = FOLDER / f"plane-format-{FORMAT}.tar.xz"
    with tempfile.TemporaryDirectory() as folder, tarfile.open(path, "w:xz", preset=9) as archive:
        data, expected = Path(folder, "data"), Path(folder, "expected.json")
        with fastness.open(f"dir:{data}", clock=clock) as plane:
            populated["populate"](plane, clock)
        archive.add(data, data.name, filter=_anonymous)
        with fastness.open(f"dir:{data}", clock=clock) as plane:
            found = {"seen": populated["everything"](plane), "used": populated["use"](plane, clock)}
        expected.write_bytes(msgspec.json.encode(found))
        archive.add(expected, expected.name, filter=_anonymous)
    print(f"{path} has {path.stat().st_size:,} bytes")


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """A file without its owner and its time. RocksDB's log of what it did is left out."""
    if Path(member.name).name == "LOG":
        return None
    return member.replace(uid=0, gid=0, uname="", gname="", mtime=0, deep=False)


if __name__ == "__main__":
    main()
