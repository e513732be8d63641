"""Every table of a finished `bench all --profile mini --quick` stays as it was printed, number by number."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from golden_results import GOLDEN, RUN, print_table, write_results

FILES = sorted(path.name for path in GOLDEN.glob("*.*") if path.suffix != ".xz")


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    folder = tmp_path_factory.mktemp("golden")
    return folder, write_results(folder)


@pytest.mark.parametrize("file", FILES)
def test_a_table_is_as_it_was(frozen, file, monkeypatch, tmp_path) -> None:
    folder, paths = frozen
    monkeypatch.setenv("PROCAP_HOME", str(tmp_path))
    name, _, form = file.partition(".")
    golden = RUN.sub(lambda path: paths.get(path[0], path[0]), (GOLDEN / file).read_text())
    printed = print_table(folder, name, form).replace(str(folder), "RESULTS")
    assert re.findall(r"[\d.]+", printed) == re.findall(r"[\d.]+", golden)
    assert printed == golden
