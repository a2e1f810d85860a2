"""Experiments of the papers: many small runs, and a verdict on what a paper says of them.

config.py: the file of an experiment; cells.py: its cells and their runs; statement.py: the inequalities and their verdict;
trainer.py: the process that trains runs one after another; conduct.py: `baton experiment`; report.py: pages, tables and pictures.
"""
