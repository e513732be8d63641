"""Reproduce the paper: suites, tables, plots and report, and the command line.

console      terminal output, errors, parsing of flags
results      one table of all results, statistics, published numbers
tables       tables, as Markdown, CSV, LaTeX, HTML and JSON
plots        plots of results
suites       the experiments by name: their runs, tables and plots
sweeps       files, tables and plots of hyperparameter sweeps
runtime      speed compared with public MaPLe code
qualitative  predictions, attention and prompts
report       one HTML page of every suite
cli          one file per command of `procap`
"""
