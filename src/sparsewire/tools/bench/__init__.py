"""Measurements of `sparsewire bench`, and their tables, findings and reports.

A figure goes this way: a rank measures it (`step/rank.py`, `step/stopwatch.py`; trainings run in
`cli/`), `results.py` keeps it, a column computes with it (`step/columns.py`, `train/columns.py`,
`scale/columns.py`), and a table shows it (`table.py`): on the terminal, in a report (`report/`) and
as `summary` in results.json (`kinds.py`).
"""
