"""The page of figures: claims, runs, stored figures, tables, and a chart.

`make bench TEST=all` runs the load tests and writes `figures.json`, `figures.md` and `figures.svg`.
"""
