"""Plot results, a file per kind of plot; `benchmarks.plots.style` has what they share."""
