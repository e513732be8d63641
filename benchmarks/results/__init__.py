"""Results: every evaluation as a row of one pandas DataFrame, `load`; means, paired tests, and the paper's numbers."""

from benchmarks.results.frame import load

__all__ = ["load"]
