"""Generate images: the small labelled data sets of the group "world", which need no download."""
