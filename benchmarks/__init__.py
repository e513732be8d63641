"""Reproduce the paper: suites, tables, plots and report, and the command line.

console      terminal output, errors, parsing of flags
experiment   what a suite consists of, profiles, published numbers
results      one table of all results, statistics
tables       tables, as Markdown, CSV, LaTeX, HTML and JSON
plots        plots of results
suites       the experiments by name, and how they are planned and run
sweeps       progress and tables of hyperparameter sweeps
runtime      speed compared with public MaPLe code
qualitative  predictions, attention and prompts
report       one HTML page of every suite
cli          one file per command of `procap`
"""
