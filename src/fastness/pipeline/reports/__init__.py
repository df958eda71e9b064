"""The report: one self-contained HTML page.

facts.py         the numbers of the page, read from the aggregates of the lake
charts.py        lines over time, drawn by uPlot in the browser, with a table of the same numbers
formatting.py    numbers, bytes, durations and times as text
components.py    HTML building blocks: tables with bars, and grids of numbers
page.py          the page
"""
