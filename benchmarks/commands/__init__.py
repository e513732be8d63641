"""What each command of `procap` does, a file each, and how flags become runs."""
