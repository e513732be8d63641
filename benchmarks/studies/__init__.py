"""Measure this program itself; each study is run by hand. Not part of the wheel."""

from runner.environment import library_defaults

# Studies import torch at the top of their modules, which then reads what is set here.
library_defaults()
