"""The studies: what they measure can be computed by hand, and their pages show what was recorded."""

import json
import math
import random
import statistics
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_results import put_halves

from benchmarks.studies import cluster_simulation, cpu_settings, scaling
from benchmarks.studies.chaos import __main__ as chaos
from benchmarks.studies.chaos.damage import damage_files, list_files
from benchmarks.studies.cluster_simulation import Conditions, SimulatedRun, simulate
from benchmarks.suites.cost import makespan
from procap.errors import UsageError
from procap.weights.loading import load_clip
from runner.run_folders import find_runs

CALM = Conditions(mtbf_hours=None)
SECONDS = st.lists(st.floats(0.1, 1000.0), min_size=1, max_size=30)
GPUS = st.integers(1, 40)


@settings(deadline=None)
@given(seconds=SECONDS, gpus=GPUS, start=st.floats(0.0, 50.0))
def test_without_failures_runs_end_as_greedy_packing_does(seconds, gpus, start):
    found = simulate([SimulatedRun(one, start=start) for one in seconds], gpus, CALM)
    assert found.makespan == pytest.approx(makespan([one + start for one in seconds], gpus))
    assert (found.failures, found.interrupted, found.lost) == (0, 0, 0.0)
    assert found.utilization == pytest.approx(sum(seconds) / (gpus * found.makespan))
    # Graham 1966: any list is within 2 - 1/m of the best, which is no shorter than the floor.
    assert found.floor - 1e-6 <= found.makespan <= (2 - 1 / gpus) * found.floor + 1e-6


def test_a_failing_gpu_takes_what_the_renewal_formula_expects():
    conditions = Conditions(per_node=1, mtbf_hours=1.0, checkpoint=600.0, notice=30.0, replace=300.0)
    rate, segment, segments, start = 1 / 3600.0, 600.0, 12, 40.0
    # A segment from a cold start, begun again after every failure and replacement; and one that goes on from the last.
    cold = (math.exp(rate * (start + segment)) - 1) * (1 / rate + conditions.replace)
    warm = (1 - math.exp(-rate * segment)) * (1 / rate + conditions.replace + cold)
    expected = cold + (segments - 1) * warm
    found = [simulate([SimulatedRun(segment * segments, start=start)], 1, conditions, seed) for seed in range(1000)]
    times = [one.makespan for one in found]
    error = statistics.stdev(times) / math.sqrt(len(times))
    assert abs(statistics.fmean(times) - expected) < 4 * error < 0.04 * expected
    for one in found:
        # Every second is work that counted, work that was lost, a start, or a wait for another node.
        waited = one.makespan - one.useful - one.lost - one.starting
        assert waited == pytest.approx(conditions.replace * one.failures, abs=1e-6)


@given(seconds=SECONDS, gpus=st.integers(1, 20), mtbf=st.floats(0.05, 2.0), seed=st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_failures_lose_at_most_what_lies_between_checkpoints(seconds, gpus, mtbf, seed):
    conditions = Conditions(per_node=4, mtbf_hours=mtbf, checkpoint=30.0, notice=10.0, replace=60.0)
    found = simulate([SimulatedRun(one, start=5.0) for one in seconds], gpus, conditions, seed)
    assert found.makespan >= found.floor - 1e-6
    assert found.useful == pytest.approx(sum(seconds))
    assert found.lost <= 30.0 * found.interrupted + 1e-6
    assert found.starting <= 5.0 * (len(seconds) + found.interrupted) + 1e-6


def test_nodes_that_fail_before_anything_is_saved_are_refused():
    conditions = Conditions(per_node=4, mtbf_hours=0.1)
    assert simulate([SimulatedRun(9000.0, (300.0,), start=20.0)], 4, conditions).failures > 0
    with pytest.raises(UsageError, match=r"fail every 0\.1 hours .* 0\.11 hours at least"):
        simulate([SimulatedRun(60.0, (350.0,), start=20.0)], 8, conditions)


def test_the_command_writes_its_tables(tmp_path, capsys):
    flags = ["--gpus", "8,1", "--seeds", "2", "--mtbf-hours", "100", "--out", str(tmp_path)]
    assert cluster_simulation.main(flags) == 0
    text = capsys.readouterr().out
    assert "NO GPU WAS MEASURED" in text and "165 runs" in text and "Table 1 on 1 to 8 GPUs" in text
    report = json.loads((tmp_path / "cluster.json").read_text())
    for case in report["cases"]:
        one, eight = case["sizes"]
        assert 6 < one["seconds"] / eight["seconds"] < 8.5
        assert one["floor"] == pytest.approx(3600 * case["gpu_hours"])
    assert (tmp_path / "cluster.md").read_text() in text


def test_damage_is_random_and_is_undone_as_a_user_would(few_digits, tmp_path):
    results, data = tmp_path / "results", tmp_path / "data"
    (data / "digits").mkdir(parents=True)
    (data / "digits" / "manifest.json").write_text("{}")
    kinds: set[str] = set()
    for seed in range(30):
        put_halves(results, "coop", "digits", (3, 4), (1, 2))
        put_halves(results, "maple", "digits", (3, 4), (1, 2))
        before = list_files(tmp_path)
        damage = damage_files(random.Random(seed), results, data)
        kinds |= {one.kind for one in damage}
        for one in reversed(damage):
            one.undo()
        after = list_files(tmp_path)
        assert all(before[path] == content for path, content in after.items()), (seed, [*map(str, damage)])
        assert (damage == []) <= (before == after) and len(find_runs(results)) >= 2 - len(damage)
    assert kinds == {"truncate", "flip", "remove", "duplicate"}


@pytest.mark.parametrize(("code", "err", "is_clear"), [
    (0, "", True),
    (1, "procap: error: no data\n", True),
    (3, "procap: 1 done, 1 failed:\n", True),
    (143, "procap: stopped\n", True),
    (-9, "", True),
    (1, "", False),
    (1, "procap: error: one\nprocap: error: two\n", False),
    (0, "Traceback (most recent call last):\n", False),
    (1, "procap: internal error: KeyError\n", False),
    (-11, "", False),
])  # fmt: skip
def test_an_end_is_clear_or_not(code, err, is_clear):
    assert (chaos.describe_unclear_end(code, err) == []) == is_clear


@pytest.mark.slow
def test_a_seed_ends_as_an_undisturbed_run_and_is_not_repeated(tmp_path, capsys):
    assert chaos.main(["--seeds", "1", "--out", str(tmp_path)]) == 0
    [seed] = json.loads((tmp_path / "chaos.json").read_text())["seeds"]
    assert seed["faults"] and len(seed["ends"]) > 1 and seed["ends"][-1].startswith("0:") and seed["wrong"] == []
    first = capsys.readouterr().out
    assert chaos.main(["--seeds", "1", "--out", str(tmp_path)]) == 0 and capsys.readouterr().out == first


def test_the_ways_to_make_patches_give_the_same_rows():
    ways, setting = dict(cpu_settings._patch_ways(load_clip(), 2)), cpu_settings.Setting("", 1, bf16=False)
    wanted = ways.pop("convolution")(setting)
    assert wanted.shape == (2, 36, 128) and len(ways) == 2
    for name, way in ways.items():
        assert torch.allclose(way(setting), wanted, atol=1e-5), name


def test_a_setting_holds_for_its_work_alone():
    def work(setting):
        with setting.autocast():
            return torch.get_num_threads(), (torch.ones(2, 2) @ torch.ones(2, 2)).dtype

    try:
        assert cpu_settings.Setting("", 2, bf16=True).run(work) == (2, torch.bfloat16)
    finally:
        torch.set_num_threads(1)
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.slow
def test_every_setting_is_compared_with_the_first_and_only_the_named_file_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cpu_settings.main(["--batches", "2", "--classes", "3", "--rounds", "1", "--json", "--out", "new/settings.json"])
    found = json.loads(capsys.readouterr().out)
    assert [path.name for path in tmp_path.rglob("*")] == ["new", "settings.json"]
    assert found == json.loads((tmp_path / "new" / "settings.json").read_text())
    assert torch.get_num_threads() == 1
    by_work = {}
    for row in found["rows"]:
        by_work.setdefault(row["work"], []).append(row)
        assert row["milliseconds"] > 0 and row["batch"] == 2
    parts = ["of it refinement", "of it optimizer"]
    assert list(by_work) == ["training step", *parts, "evaluated batch", "patches alone"]
    assert all(rows[0]["gain"] == 1.0 for rows in by_work.values())
    names = [setting.name for setting in cpu_settings.settings_here()]
    assert [row["setting"] for row in by_work["training step"]] == names
    assert all(row["setting"] in cpu_settings.table(found) for row in found["rows"])


@pytest.mark.parametrize(("study", "line", "words"), [
    (scaling, "--batch 5", "--batch"),
    (scaling, "--processes 1", "--processes"),
    (scaling, "--classes 1", "--classes"),
    (scaling, "--methods zeroshot", "zeroshot"),
    (scaling, "--backbone vit-z", "vit-z"),
    (cluster_simulation, "--gpus none", "--gpus"),
    (cluster_simulation, "--gpus 0,4", "--gpus"),
    (cluster_simulation, "--replace nan", "--replace"),
    (cpu_settings, "--batches four", "4,32"),
    (cpu_settings, "--batches 0", "at least 1"),
    (cpu_settings, "--rounds 0", "at least 1"),
    (cpu_settings, "--classes -1", "at least 1"),
    (cpu_settings, "--backbone vit-z", "vit-z"),
])  # fmt: skip
def test_unusable_flags_are_refused_in_one_line(study, line, words, capsys):
    try:
        code = study.main(line.split())
    except SystemExit as stop:
        code = stop.code
    assert code == 2 and words in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(("study", "name"), [(scaling, "scaling"), (cluster_simulation, "cluster")])
def test_the_page_shows_the_record(study, name):
    record = Path(__file__).parents[1] / "docs" / "results" / f"{name}.json"
    assert record.with_suffix(".md").read_text() == study.format_report(json.loads(record.read_text()))


@pytest.mark.slow
def test_every_variant_takes_the_step_of_one_process_and_counts_what_it_sends(tmp_path, capfd):
    flags = "--classes 9 --batch 4 --rounds 1 --budget 0 --methods maple --json --out"
    assert scaling.main([*flags.split(), str(tmp_path)]) == 0
    report = json.loads(capfd.readouterr().out)
    assert json.loads((tmp_path / "scaling.json").read_text()) == report
    assert (tmp_path / "scaling.md").read_text() == scaling.format_report(report)
    alone, sharded, whole = report["rows"]
    assert [row["variant"]["processes"] for row in report["rows"]] == [1, 2, 2]
    assert alone["sent_bytes"] == alone["messages"] == 0
    for row in (sharded, whole):
        assert row["loss"] == pytest.approx(alone["loss"], rel=1e-5) and row["median"] > 0
        # Of two processes each sends half of what is gathered (9 classes are padded to 10), and its gradients once.
        features = 2 + (5 if row is sharded else 0)
        assert row["sent_bytes"] == 4 * row["learnables"] + 4 * load_clip().geometry.embed_dim * features
    assert sharded["tensor_bytes"] < whole["tensor_bytes"] < alone["tensor_bytes"]
