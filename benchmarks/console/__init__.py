"""Print output, exit codes and one-line errors."""
