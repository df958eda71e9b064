"""The plots of docs/benchmarks.md show exactly the figures of its tables."""

import json
import re
import runpy
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
PAGE_TOOL = runpy.run_path(str(ROOT / "benches" / "page.py"))
TEXT = (ROOT / "docs" / "benchmarks.md").read_text()
every_plot = pytest.mark.parametrize("name", [*PAGE_TOOL["PLOTS"], PAGE_TOOL["PEERS"]])


@every_plot
def test_plot_shows_the_figures_of_the_page(name: str) -> None:
    with Image.open(ROOT / "docs" / "plots" / f"{name}.png") as image:
        plotted = json.loads(image.info[PAGE_TOOL["FIGURES"]])
    assert plotted == PAGE_TOOL["figures"](TEXT, name), "docs/benchmarks.md has changed; run: python -m benches.page"
    assert all(plotted.values())


@every_plot
def test_every_plotted_figure_is_in_the_page(name: str) -> None:
    for rows in PAGE_TOOL["figures"](TEXT, name).values():
        for row, columns in rows.items():
            for rate in columns.values():
                assert re.search(rf"\b{rate:,.0f}\b", TEXT), row


@every_plot
def test_page_embeds_its_plots(name: str) -> None:
    assert f"](plots/{name}.png)" in TEXT
