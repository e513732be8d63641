"""The command line: one file per command, its flags beside its body."""
