"""Measure this program itself; each study is run by hand. Not part of the wheel."""
