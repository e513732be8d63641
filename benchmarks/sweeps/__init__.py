"""What a sweep is asked for and what it shows; `cluster` carries it out."""
