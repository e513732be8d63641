"""The ledger of reproductions: what an export writes is an entry, and the files of the project are some."""

import pytest
from command_line import run
from pydantic import ValidationError
from sessions import evaluate, train
from small_runs import make_runtime

from procap.methods import METHODS
from runner.config import Target
from runner.ledger import LedgerEntry
from runner.planning import plan_run
from shards.catalogue import find_or_none
from tools.ledger import PAGE, fill_page, make_table, read_entries

ENTRIES = read_entries()


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_of_the_project_has_a_known_method_and_known_data(name):
    entry = ENTRIES[name]
    assert name == entry.file and entry.method in METHODS and find_or_none(entry.dataset)
    assert all(find_or_none(Target.parse_unchecked(count.target).dataset) for count in entry.counts)


def test_the_page_has_all_entries():
    page = PAGE.read_text()
    assert fill_page(page, [*ENTRIES.values()]) == page, "python -m tools.ledger writes it"


def test_a_run_is_exported_as_an_entry_which_digests_and_counts_must_fit(
    few_digits, short_checkpoint, tmp_path, capsys
):
    config = plan_run(method="ncm", dataset="digits", shots=2, sampling="natural", backbone=str(short_checkpoint))
    runtime, out = make_runtime(few_digits, tmp_path), tmp_path / "ledger"
    train(config, runtime)
    words = "export", config.hash, "--results", tmp_path, "--format", "ledger", "--out", out
    code, _, err = run(capsys, *words)
    assert code == 1 and "has no result of all images" in err
    result = evaluate(config, Target("digits", "base"), runtime)
    assert run(capsys, *words)[0] == 0
    [(name, entry)] = read_entries(out).items()
    assert (name, entry.config_hash, entry.counts[0].correct) == (entry.file, config.hash, result.correct)
    assert (
        entry.manifest_digest == result.manifest_digest and str(short_checkpoint.parent) not in entry.model_dump_json()
    )
    assert "base classes, 2 shots (natural)" in make_table([entry])
    document = entry.model_dump(by_alias=True, mode="json")
    for wrong in ({"backbone_digest": "0"}, {"counts": [document["counts"][0] | {"correct": 10**6}]}, {"extra": 1}):
        with pytest.raises(ValidationError):
            LedgerEntry.model_validate(document | wrong)
