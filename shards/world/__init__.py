"""Generated images: small labelled data sets that need no download."""
