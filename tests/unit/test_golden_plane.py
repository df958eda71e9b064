"""A plane that `tests/golden/write_plane.py` wrote is opened and read, so its format does not change unnoticed."""

import json
import runpy
import tarfile
from pathlib import Path
from typing import Any

import msgspec

import fastness
from fastness.kv.formats import FORMAT
from fastness.testing.clock import ManualClock

TESTS = Path(__file__).parents[1]
POPULATED = runpy.run_path(str(TESTS / "populated.py"))  # Test files cannot import each other.


def as_json(value: Any) -> Any:
    return json.loads(msgspec.json.encode(value))


def test_the_golden_plane_is_read_completely_and_used(tmp_path: Path, clock: ManualClock) -> None:
    with tarfile.open(TESTS / "golden" / f"plane-format-{FORMAT}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    expected = json.loads((tmp_path / "expected.json").read_bytes())
    with fastness.open(f"dir:{tmp_path / 'data'}", clock=clock) as plane:
        assert as_json(POPULATED["everything"](plane)) == expected["seen"]
        assert as_json(POPULATED["use"](plane, clock)) == expected["used"]
