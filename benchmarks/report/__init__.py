"""The report: one page of every table and figure that there is."""
