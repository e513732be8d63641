"""Test on the user's device which accelerations compute equal numbers and save time: `procap check device`."""
