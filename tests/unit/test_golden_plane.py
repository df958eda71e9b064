"""The golden plane is opened, read and used, so the format of the data does not change unnoticed."""

import json
import runpy
from pathlib import Path

GOLDEN = runpy.run_path(str(Path(__file__).parents[1] / "golden" / "write_plane.py"))  # Tests cannot import it.


def test_the_golden_plane_is_read_completely_and_used(tmp_path: Path) -> None:
    assert GOLDEN["read"](tmp_path) == json.loads(GOLDEN["FOUND"].read_bytes())
