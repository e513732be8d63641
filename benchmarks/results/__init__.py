"""Load results as a DataFrame with a row per evaluation (`load`), average them, and compare them with the paper's."""

from benchmarks.results.frame import load

__all__ = ["load"]
