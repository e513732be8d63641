"""Kill random processes of a cluster and damage random files, and check that results stay the same."""
