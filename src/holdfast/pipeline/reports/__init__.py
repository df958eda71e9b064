"""The report: one page that needs nothing but a browser.

facts.py     what the sums of the lake say, as few numbers as a page shows
plots.py     lines, bars and grids as SVG; their colours come from the page, so they are right by day and by night
words.py     numbers, bytes, durations and moments as people read them
page.py      the page
"""
