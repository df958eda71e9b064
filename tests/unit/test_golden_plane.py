"""The golden plane is opened, read and used, so the format of the data does not change unnoticed."""

import json
from pathlib import Path

from tests.golden import write_plane


def test_the_golden_plane_is_read_completely_and_used(tmp_path: Path) -> None:
    assert write_plane.read(tmp_path) == json.loads(write_plane.FOUND.read_bytes())
