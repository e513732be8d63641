"""Data: what data sets there are, how they are packed into WebDataset shards, and how they are read again."""
