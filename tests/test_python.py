"""`import procap`: names of the package from Python."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from own_images import CLASSES, put_classes

import procap
from benchmarks.cli import main
from procap.errors import UsageError
from shards.manifest import read_manifest

ROOT = Path(__file__).resolve().parents[1]


def python(code: str, folder: Path) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    return subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.usefixtures("at_home")
def test_a_folder_is_packed_trained_on_and_evaluated_in_a_few_lines(tmp_path):
    put_classes(tmp_path / "birds")
    manifest = procap.pack("birds", data="shards")
    assert manifest.classnames == tuple(sorted(CLASSES)) and (tmp_path / "birds.yaml").exists()
    run = procap.train(method="ncm", dataset="birds", classes="all", shots=2, data="shards", tracking_uri="off")
    result = procap.evaluate(run, "birds")
    assert result.total == manifest.counts["test"]
    with pytest.raises(UsageError, match="data, limit: a run has the settings of its session"):
        procap.evaluate(run, "birds", data="elsewhere", limit=2)
    again = procap.evaluate(run.folder, "birds", data="shards", tracking_uri="off")
    assert again == result
    [row] = procap.load_results("results").to_dict("records")
    assert (row["method"], row["correct"], row["total"]) == ("ncm", result.correct, result.total)
    assert procap.Classifier.load(run.folder)([tmp_path / "birds" / CLASSES[0] / "00.png"]).shape == (1, len(CLASSES))
    assert procap.features("birds", "test", data="shards").features.shape[0] == result.total


@pytest.mark.usefixtures("at_home")
def test_a_packed_set_is_not_replaced_by_another_folder_of_its_name(tmp_path):
    put_classes(tmp_path / "birds")
    put_classes(tmp_path / "more" / "birds", classes=CLASSES[:2])
    manifest = procap.pack("birds", data="shards")
    with pytest.raises(UsageError, match="'birds' was packed from another folder"):
        procap.pack("more/birds", data="shards")
    assert read_manifest(tmp_path / "shards" / "birds") == manifest and not (tmp_path / "more" / "birds.yaml").exists()


@pytest.mark.usefixtures("at_home")
@pytest.mark.parametrize("recipe", ["", "published", "procap"])
@pytest.mark.parametrize("method", ["coop", "maple", "tda"])
def test_python_plans_the_run_of_the_command_line(method, recipe, capsys):
    chosen = f"--methods {method} --datasets digits --shots 4" + (f" --recipe {recipe}" if recipe else "")
    assert main(["train", *chosen.split(), "--dry-run", "--json"]) == 0
    [planned] = json.loads(capsys.readouterr().out)["runs"]
    run = procap.Session().get_run(method=method, dataset="digits", shots=4, **({"recipe": recipe} if recipe else {}))
    assert run.config.path == planned["run"]


def test_an_unknown_setting_is_named_with_what_would_work():
    with pytest.raises(UsageError, match=r"epochs is part of the recipe: overrides=\{'epochs': \.\.\.\}"):
        procap.train(method="coop", dataset="digits", epochs=3)
    with pytest.raises(UsageError, match="unknown setting 'seeds': did you mean seed"):
        procap.train(method="coop", dataset="digits", seeds=3)


@pytest.mark.parametrize("wrong", [[], None, "results"])
def test_what_is_no_run_is_no_classifier(wrong):
    with pytest.raises(UsageError, match=r"is no trained run: procap\.Classifier\.load"):
        procap.Classifier(wrong)


def test_importing_costs_nothing_and_names_are_listed():
    code = "import json, sys, procap; print(json.dumps([len(sys.modules), dir(procap)]))"
    modules, names = json.loads(python(code, ROOT).stdout)
    assert modules < 150 and {*procap.__all__} <= {*names}


@pytest.mark.parametrize(("hidden", "name"), [
    ("runner", "train"), ("shards", "train"), ("benchmarks", "load_results"),
])  # fmt: skip
def test_a_file_of_the_user_that_hides_a_package_is_named(hidden, name, tmp_path):
    (tmp_path / f"{hidden}.py").touch()
    assert (
        f"{tmp_path / hidden}.py hides the package '{hidden}'"
        in python(f"import procap; procap.{name}", tmp_path).stderr
    )
