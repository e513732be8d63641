"""Every table of a finished `bench all --profile mini --quick` stays as it was printed, number by number."""

import re

import pytest
from golden_results import COMMANDS, GOLDEN, RUN, print_tables, write_results


@pytest.fixture(scope="module")
def frozen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("golden")
    return folder, write_results(folder)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_table_is_as_it_was(frozen, name, monkeypatch, tmp_path):
    folder, paths = frozen
    monkeypatch.setenv("PROCAP_HOME", str(tmp_path))
    texts = print_tables(folder, name)
    files = [path for path in GOLDEN.glob(f"{name}.*") if path.suffix != ".xz"]
    assert files
    for file in files:
        golden = RUN.sub(lambda path: paths.get(path[0], path[0]), file.read_text())
        printed = texts[file.suffix[1:]].replace(str(folder), "RESULTS")
        assert re.findall(r"[\d.]+", printed) == re.findall(r"[\d.]+", golden), file.name
        assert printed == golden, file.name


def test_at_most_four_notes_follow_a_table_and_none_a_table_in_latex():
    for file in GOLDEN.glob("*.md"):
        blocks = file.read_text().split("\n\n")
        assert max(block.count("\n- ") + block.startswith("- ") for block in blocks) <= 4, file.name
    for file in GOLDEN.glob("*.latex"):
        comments = [line for line in file.read_text().splitlines() if line.startswith("%")]
        assert all("needs" in line for line in comments), file.name
