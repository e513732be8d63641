"""Whether one line of results is better than another, or lucky."""
