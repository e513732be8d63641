"""What runs cost before they are run: counted operations over measured or assumed paces."""
