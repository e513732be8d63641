"""The CPU settings benchmark measures equal work under every setting, and leaves the process as it found it."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.studies import cpu_settings
from procap.weights.mini import load_mini


def test_the_ways_to_make_patches_give_the_same_rows():
    ways, setting = dict(cpu_settings._patch_ways(load_mini(), 2)), cpu_settings.Setting("", 1, bf16=False)
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


@pytest.mark.parametrize("wrong", [["--batches", "four"], ["--batches", "0"], ["--rounds", "0"], ["--classes", "-1"]])
def test_sizes_that_measure_nothing_are_refused(wrong, capsys):
    with pytest.raises(SystemExit) as stop:
        cpu_settings.main(wrong)
    assert stop.value.code == 2 and capsys.readouterr().err.strip().endswith(("4,32", "at least 1"))


def test_an_unknown_backbone_is_named(capsys):
    with pytest.raises(SystemExit):
        cpu_settings.main(["--backbone", "vit-z"])
    assert "vit-z" in capsys.readouterr().err.splitlines()[-1]
