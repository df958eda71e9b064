"""The scripts that a report of the pipeline may run: uPlot, and the one that draws the report's charts with it.

The pipeline embeds these bytes in its pages. The console shows a report with a policy that names their hashes, so that
no other script in the file runs. A report of another version may have other scripts: its charts are then not drawn, and
its tables have the same numbers.
"""

import base64
import hashlib
from functools import cache
from importlib.resources import files
from typing import Final

_UPLOT: Final = ("static", "uplot.js")
_CHARTS: Final = ("report_charts.js",)


@cache
def scripts() -> tuple[str, ...]:
    """The text of the scripts, in the order in which a page contains them."""
    return tuple(files(__package__).joinpath(*path).read_text("utf-8") for path in (_UPLOT, _CHARTS))


@cache
def chart_style() -> str:
    """The styles of uPlot."""
    return files(__package__).joinpath("static", "uplot.css").read_text("utf-8")


@cache
def script_sources() -> str:
    """The `script-src` of a Content-Security-Policy that allows these scripts only."""
    return " ".join(source_hash(text) for text in scripts())


def source_hash(text: str) -> str:
    """An inline script or style as a source of a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
