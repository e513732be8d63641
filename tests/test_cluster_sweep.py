"""What `procap sweep` plans, refuses and shows, without Ray."""

from __future__ import annotations

import json

import pytest

from benchmarks.cli import main
from benchmarks.sweeps.table import find_best_of_each, format_table, summarize
from cluster.configuration import Configuration, SweepSettings, make_runs

ASKED = ["--methods", "coop", "--datasets", "digits", "--seeds", "1,2", "--shots", "2", "--epochs", "3"]
PARAMS = ["--param", "class_position=front", "--recipe-field", "warmup=none"]
GRID = ["--name", "grid", "--param", "lr=1e4,1e3,0.02", *PARAMS]


def sweep_settings(**changes: object) -> SweepSettings:
    fields: dict[str, object] = {"name": "s", "space": {}, "methods": ("coop",), "datasets": ("digits",), "seeds": (1,)}
    return SweepSettings.model_validate(fields | changes)


@pytest.fixture(scope="module")
def where(few_digits, tiny_checkpoint) -> list[str]:
    return ["--backbone", str(tiny_checkpoint), "--data", str(few_digits), "--max-concurrent", "1", "--tracking", "off"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--device", "cuda:99"], "'cuda:99'"),
        (["--backbone", "/none.pt"], "/none.pt"),
        (["--device", "cpu", "--accelerate", "graphs"], "needs a CUDA device, not cpu"),
        (["--launcher", "ray", "--address", "127.0.0.1:1"], "no Ray cluster at 127.0.0.1:1"),
    ],
)
def test_what_no_run_would_have_is_reported_once_and_leaves_no_sweep(few_digits, tmp_path, capsys, words, named):
    places = ["--data", str(few_digits), "--results", str(tmp_path / "results"), "--tracking", "off"]
    assert main(["sweep", *ASKED, *GRID, *words, *places]) in (1, 2)
    errors = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(errors) == 1 and named in errors[0]
    assert not list((tmp_path / "results").rglob("*.json"))


def test_a_plan_writes_nothing_and_lists_what_would_be_done(where, tmp_path, capsys) -> None:
    assert main(["sweep", *ASKED, *GRID, *where, "--results", str(tmp_path), "--dry-run", "--json"]) == 0
    out = capsys.readouterr().out
    document = json.loads(out.splitlines()[-1])
    assert "6 runs in all" in out and document["total"] == 3
    assert [one["state"] for one in document["configurations"]] == ["new"] * 3
    assert not list(tmp_path.iterdir())
    shots = ["--methods", "coop", "--datasets", "digits", "--param", "shots=4,full,0", *where]
    assert main(["sweep", *shots, "--results", str(tmp_path), "--dry-run", "--json"]) == 0
    assert [one["values"] for one in json.loads(capsys.readouterr().out.splitlines()[-1])["configurations"]] == [
        {"shots": 4},
        {"shots": 0},
    ]


@pytest.mark.parametrize(
    ("method", "param", "has_effect"),
    [("zeroshot", "lr=1e-3,1e-2", False), ("coop", "lr=1e-3,0.001", False), ("coop", "lr=1e-3,1e-2", True),
     ("zeroshot,coop", "lr=loguniform(1e-3,1e-2)", True)],
)  # fmt: skip
def test_a_field_whose_values_give_the_same_runs_is_noted(method, param, has_effect, where, tmp_path, capsys) -> None:
    words = ["sweep", "--methods", method, "--datasets", "digits", "--param", param, "--dry-run"]
    words += ["--trials", "2"] if "uniform" in param else []
    assert main([*words, *where, "--results", str(tmp_path)]) == 0
    assert ("all values of lr give the same runs" in capsys.readouterr().err) is not has_effect


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--param", "seed=1,2"], "averaged over all of --seeds"),
        (["--param", "lr=1e-3,fast"], "lr = 'fast'"),
        (["--param", "shots=3,-1"], "shots = -1"),
        (["--param", "lr=0.1,inf"], "lr must be a finite number"),
        (["--param", "lr=0.1,1e999"], "lr must be a finite number"),
        (["--param", "lr=loguniform(1e-4,1)", "--search", "grid"], "use random or tpe"),
        (["--param", "lr=loguniform(1e-4,1)"], "--trials or --hours"),
        (["--param", "lr=uniform(-2,-1)", "--trials", "9"], "lr = -1.5"),
        (["--param", "lr=1,2", "--trials", "1"], "leave out --trials"),
        (["--param", "lr=1e-3", "--metric", "test"], "metric = 'test'"),
        (["--param", "lr=1e-3", "--classes", "novel"], "classes = 'novel'"),
        (["--param", "lr=1e-3", "--grace-period", "2"], "add --scheduler asha"),
        (["--param", "lr=1e-3", "--hours", "inf"], "--hours inf: a finite number is needed"),
        (["--param", "lr=1e-3", "--search", "tpee"], "search = 'tpee'"),
        (["--param", "epochs=1,2", "--scheduler", "asha"], "cannot be varied"),
        (
            ["--param", "lr=1e-3", "--scheduler", "asha", "--grace-period", "3"],
            "give a smaller --grace-period",
        ),
        (["--param", "shots=4,many"], "--shots many: one number of images per class"),
        (["--param", "lr=1", "--param", "recipe.lr=2"], "given twice"),
        (["--param", "lr=1e-3", "--lr", "0.5"], "has one value as well"),
        (["--param", "lr=1e-3", "--accelerate", "foo", "--dry-run"], "known are auto, off,"),
        (["--param", "lr=1e-3", "--engine", "deepspeed", "--zero-stage", "7", "--dry-run"], "ZeRO stage 7 is not"),
    ],
)
def test_what_cannot_be_searched_is_refused_in_one_line_and_starts_nothing(words, message, where, tmp_path, capsys):
    # Shots and epochs must not be given twice.
    asked = ASKED[:-4] if words[1].startswith(("shots", "epochs")) else ASKED
    assert main(["sweep", *asked, *words, *where, "--results", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_data_sets_that_cannot_be_compared_or_have_no_validation_images_are_refused(where, tmp_path, capsys) -> None:
    both = ["--methods", "coop", "--param", "dataset=digits,shapes", *where, "--results", str(tmp_path)]
    for flags in (["--search", "tpe", "--trials", "2"], ["--scheduler", "asha"]):
        assert main(["sweep", *both, *flags]) == 2
        assert "different data sets do not compare" in capsys.readouterr().err
    assert main(["sweep", "--methods", "coop", "--datasets", "imagenet", "--data", str(tmp_path)]) == 2
    assert "imagenet has no validation images" in capsys.readouterr().err


def test_configurations_on_different_data_sets_are_not_compared() -> None:
    varied = sweep_settings(space={"dataset": ["digits", "tiles"], "recipe.lr": [1, 2]}, datasets=("digits", "tiles"))
    scores = {("digits", 1): 40.0, ("digits", 2): 50.0, ("tiles", 1): 90.0, ("tiles", 2): 80.0}
    found = [
        Configuration(number=number, values={"dataset": name, "recipe.lr": lr}, state="finished", score=score, epochs=9)
        for number, ((name, lr), score) in enumerate(scores.items())
    ]
    document = summarize(varied, found, [])
    assert document["best"] is None and document["best_by_method"] == {}
    assert {name: one.values["recipe.lr"] for name, one in find_best_of_each(varied, found).items()} == {
        "digits": 2,
        "tiles": 1,
    }
    assert [line.split()[0] for line in format_table(varied, found).splitlines() if "best" in line] == [
        "tiles",
        "digits",
    ]


def test_several_data_sets_are_averaged_over(few_digits, tiny_checkpoint) -> None:
    both = sweep_settings(datasets=("digits", "shapes"), seeds=(1, 2), backbone=str(tiny_checkpoint))
    runs = make_runs(both, {"recipe.lr": 0.1}, few_digits)
    assert [(run.config.dataset, run.config.seed, run.targets) for run in runs] == [
        (name, seed, (f"{name}:base:val",)) for name in ("digits", "shapes") for seed in (1, 2)
    ]
