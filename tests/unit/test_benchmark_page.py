"""The plots of docs/benchmarks.md show exactly the figures of its tables."""

import json
import re
from pathlib import Path

import pytest
from PIL import Image

from benches import page

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "benchmarks.md").read_text()
every_plot = pytest.mark.parametrize("name", [*page.PLOTS, page.PEERS])


@every_plot
def test_plot_shows_the_figures_of_the_page(name: str) -> None:
    with Image.open(ROOT / "docs" / "plots" / f"{name}.png") as image:
        plotted = json.loads(image.info[page.FIGURES])
    assert plotted == page.figures(TEXT, name), "docs/benchmarks.md has changed; run: python -m benches.page"
    assert all(plotted.values())


@every_plot
def test_every_plotted_figure_is_in_the_page(name: str) -> None:
    for rows in page.figures(TEXT, name).values():
        for row, columns in rows.items():
            for rate in columns.values():
                assert re.search(rf"\b{rate:,.0f}\b", TEXT), row


@every_plot
def test_page_embeds_its_plots(name: str) -> None:
    assert f"](plots/{name}.png)" in TEXT
