"""Plot results, a file per kind of plot; `benchmarks.plots.style` has what they share."""

from benchmarks.plots.style import COLOURS, FAINT, FORMATS, GRID, INK, MARKERS, SPARE, grid, image_of, save_plots

__all__ = ["COLOURS", "FAINT", "FORMATS", "GRID", "INK", "MARKERS", "SPARE", "grid", "image_of", "save_plots"]
