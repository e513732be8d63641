"""Tests of the method visual-tokens: python -m pytest."""

from benchmarks.cli import main
from procap.methods import method_options


def test_the_method_passes_all_checks():
    assert main(["check", "method", "visual-tokens"]) == 0


def test_options():
    assert method_options("visual-tokens", {"n_ctx": 2}).model_dump()["n_ctx"] == 2
