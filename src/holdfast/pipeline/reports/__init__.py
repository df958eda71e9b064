"""The report: one self-contained HTML page.

facts.py         the numbers of the page, read from the aggregates of the lake
plots.py         lines, bars and grids as SVG; colours come from the page's CSS, for light and dark mode
formatting.py    numbers, bytes, durations and times as text
components.py    HTML building blocks: tables and figures
page.py          the page
"""
