"""Measurements of this program itself, each runnable by hand. Not part of the wheel."""
