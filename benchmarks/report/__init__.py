"""The report: every table and plot of a results folder on one HTML page."""
