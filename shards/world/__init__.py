"""Generate images: the small labelled data sets which need no download."""
