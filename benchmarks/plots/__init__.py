"""Figures, a file per kind; what they have in common is in `benchmarks.plots.style`."""

from benchmarks.plots.style import COLOURS, FAINT, FORMATS, GRID, INK, MARKERS, SPARE, grid, image_of, save_plots

__all__ = ["COLOURS", "FAINT", "FORMATS", "GRID", "INK", "MARKERS", "SPARE", "grid", "image_of", "save_plots"]
