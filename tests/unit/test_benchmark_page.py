"""The plots of the benchmarks page show what the page says, and nothing else."""

import json
import re
import runpy
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
DRAWN = runpy.run_path(str(ROOT / "benches" / "page.py"))
TEXT = (ROOT / "docs" / "benchmarks.md").read_text()
every_plot = pytest.mark.parametrize("name", [*DRAWN["PLOTS"], DRAWN["PEERS"]])


@every_plot
def test_a_plot_is_of_the_figures_that_the_page_has(name: str) -> None:
    with Image.open(ROOT / "docs" / "plots" / f"{name}.png") as image:
        shown = json.loads(image.info[DRAWN["FIGURES"]])
    assert shown == DRAWN["figures"](TEXT, name), "the page has changed; run: python -m benches.page"
    assert all(shown.values())


@every_plot
def test_every_figure_is_in_the_page(name: str) -> None:
    for rows in DRAWN["figures"](TEXT, name).values():
        for row, columns in rows.items():
            for rate in columns.values():
                assert re.search(rf"\b{rate:,.0f}\b", TEXT), row


@every_plot
def test_the_page_shows_its_plots(name: str) -> None:
    assert f"](plots/{name}.png)" in TEXT
