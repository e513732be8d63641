"""Measure on a GPU what `procap check device` does not: whole runs, and a row of the runtime table."""
