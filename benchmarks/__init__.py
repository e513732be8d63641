"""The command line, the demo, tables and figures."""
