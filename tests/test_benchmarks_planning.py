"""What suites and single runs consist of, for whatever is chosen of them: runs, targets, recipes, shots."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import run

from benchmarks.cli import main
from benchmarks.cli.flags import SuiteFlags
from benchmarks.cli.run_suites import plan_suites
from benchmarks.experiment.profiles import MINI, PAPER, PROFILES
from benchmarks.experiment.suite import SuiteOptions
from benchmarks.results.suite_results import SuiteResults
from benchmarks.runtime.benchmark import suite_settings
from benchmarks.runtime.settings import Settings
from benchmarks.suites import SUITES, load_suite
from benchmarks.suites.plans import SuitePlan, merge_runs
from procap.errors import UsageError
from procap.methods import METHODS, method_class
from procap.recipe import READ_UNDER
from runner.config import RuntimeConfig
from runner.session import Session
from shards.catalogue import CATALOGUE

pytestmark = pytest.mark.usefixtures("at_home")

HERE = Path(__file__).parent
"""A folder without data sets."""


def plan(name: str, flags: SuiteFlags, data: Path = HERE) -> SuitePlan:
    return plan_suites([name], flags, RuntimeConfig(data, data))[0]


def plan_all(flags: SuiteFlags, data: Path) -> dict[str, SuitePlan]:
    return {plan.suite.name: plan for plan in plan_suites(list(SUITES), flags, RuntimeConfig(data, data))}


def measured(planned: SuitePlan, folder: Path) -> Settings:
    """What the suite `runtime` measures."""
    done = SuiteResults.read(planned.suite, planned.options, folder)
    return suite_settings(done, Session(RuntimeConfig(folder, folder, device="cpu")))


def test_base_to_novel_is_the_papers_table_one():
    """Eleven data sets, five methods, three seeds; 16 shots of base classes; tested on both halves."""
    suite = load_suite("base-to-novel")
    specs = [entry.spec for entry in suite.plan(suite.options(PAPER))]
    assert len(specs) == len({spec.config for spec in specs}) == 11 * (4 * 3 + 1)
    assert {(spec.config.classes, spec.config.shots) for spec in specs} == {("base", 16)}
    assert {spec.config.backbone for spec in specs} == {"ViT-B-16"}
    for spec in specs:
        name = spec.config.dataset
        assert spec.targets == (f"{name}:base:test", f"{name}:novel:test")
    trained = [
        name for name, dataset in CATALOGUE.items() if dataset.images_from == "published" and not dataset.test_only
    ]
    assert sorted(PAPER.datasets) == sorted(trained)


# Runs in the paper's profile, evaluations, and how many of the runs another suite before it has already.
COUNTS = {
    "base-to-novel": (143, 286, 0), "stability": (33, 66, 33), "cross-dataset": (13, 143, 0),
    "domain-generalization": (13, 65, 13), "few-shot": (836, 836, 4), "ablation": (44, 88, 8),
    "prompt-length": (16, 32, 4), "sensitivity": (145, 290, 5), "duration": (99, 198, 33), "runtime": (0, 0, 0),
    "qualitative": (4, 4, 2), "open-world": (143, 429, 143), "imbalance": (407, 814, 110),
}  # fmt: skip


def test_the_suites_are_the_papers_and_share_their_runs():
    """Their docstrings name these numbers; a run that several suites have is one run."""
    assert list(COUNTS) == list(SUITES)
    seen: set[str] = set()
    for name, (runs, evaluations, shared) in COUNTS.items():
        suite = load_suite(name)
        entries = suite.plan(suite.options(PAPER))
        paths = {entry.path for entry in entries}
        targets = {(entry.path, target) for entry in entries for target in entry.spec.targets}
        assert (len(paths), len(targets), len(paths & seen)) == (runs, evaluations, shared), name
        seen |= paths
    paper = SuiteFlags(profile="paper")
    specs = merge_runs(plan_all(paper, Path("data")).values())
    assert sorted(spec.config.path for spec in specs) == sorted(seen), "no two workers meet at a run"


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("quick", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_suite_can_be_planned_everywhere(profile, quick):
    """Also with methods that it is not made for; variants of a suite have keys of their own."""
    for name in SUITES:
        suite = load_suite(name)
        for methods in (None, ("zeroshot", "coop", "cocoop", "maple", "procap")):
            options = suite.options(PROFILES[profile], quick=quick, methods=methods)
            entries = suite.plan(options)
            assert SuiteOptions.from_json(options.to_json()) == options
            variants = {(entry.variant.method, tuple(entry.variant.key.items())) for entry in entries}
            untrained = [key for key in variants if key[0] == "zeroshot"]
            seeds = (len(variants) - len(untrained)) * len(options.seeds) + len(untrained)
            assert len(entries) == len(options.datasets) * seeds * (1 + suite.dev_runs)
            assert set(options.datasets) <= set(CATALOGUE)


def test_a_suite_that_also_trains_on_half_of_the_base_classes_does_so_in_the_recipe_of_its_own():
    suite = replace(load_suite("few-shot"), dev_runs=True)
    plan = suite.plan(suite.options(PAPER, methods=("maple",), datasets=("dtd",), seeds=(1,), shots=(16,)))
    assert [entry.spec.config.classes for entry in plan] == ["all", "dev-base"]
    assert len({entry.spec.config.recipe.epochs for entry in plan}) == 1


def test_the_world_decides_the_recipe_and_a_control_has_one_for_all():
    suite = load_suite("base-to-novel")

    def recipes(profile, **more):
        return {entry.variant.method: entry.spec.config.recipe for entry in suite.plan(suite.options(profile, **more))}

    own, same = recipes(PAPER), recipes(PAPER, recipe="procap")
    assert own["maple"].optimizer == "sgd" and own["coop"].epochs != own["procap"].epochs
    assert same["maple"] == same["coop"] == same["procap"] == own["procap"]
    assert recipes(MINI)["maple"].epochs == 10 and recipes(MINI, quick=True)["maple"].epochs == 2
    assert recipes(MINI, recipe="published")["maple"] == own["maple"], "published recipes are not shortened"


def test_options_of_methods_reach_the_runs_and_the_record_of_the_suite():
    option = "coprompt.sentences=sentences/{dataset}.json"
    flags = SuiteFlags(methods="maple,coprompt", datasets="dtd", seeds="0,1", option=[option, "maple.depth=3"])
    planned = plan("base-to-novel", flags)
    options = {run.variant.method: run.spec.config.options for run in planned.runs}
    assert options["coprompt"]["sentences"] == "sentences/{dataset}.json" and options["coprompt"]["n_ctx"] == 2
    assert options["maple"]["depth"] == 3
    recorded = json.loads(json.dumps(planned.options.to_json()))
    assert SuiteOptions.from_json(recorded, data=HERE) == planned.options
    generated = load_suite("base-to-novel").options(MINI, methods=("coprompt",))
    [sentences] = {run.spec.config.options["sentences"] for run in load_suite("base-to-novel").plan(generated)}
    assert sentences == "templates"


@pytest.mark.parametrize("backbone", [pytest.param("ViT-L/14", marks=pytest.mark.slow), "ViT-B/32"])
def test_every_suite_takes_another_backbone_by_one_flag(backbone, tmp_path, capsys):
    chosen = ("--quick", "--datasets", "tiles", "--backbone", backbone, "--pretrained", "random", "--dry-run")
    place = ("--data", str(tmp_path), "--results", str(tmp_path))
    assert main(["bench", "all", *chosen, *place, "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    name = backbone.replace("/", "-")
    trained = {tuple(run["run"].split("/")[1:4:2]) for run in document["runs"]}
    assert trained == {("tiles", name)}, "every suite trains on the named data sets alone"
    flags = SuiteFlags(profile="mini", quick=True, backbone=backbone, pretrained="random")
    planned = plan_all(flags, tmp_path)
    found = {suite: {run.spec.config.backbone for run in plan.runs} for suite, plan in planned.items()}
    assert found == {suite: set() if suite == "runtime" else {name} for suite in SUITES}
    settings = measured(planned["runtime"], tmp_path)
    assert (settings.backbone, settings.pretrained) == (name, "random")


def test_groups_of_methods_leave_out_a_method_whose_training_lacks_an_option(capsys):
    def planned(methods: str, profile: str = "paper", *option: str) -> set[str]:
        flags = SuiteFlags(methods=methods, profile=profile, datasets="", seeds="1", shots="1", option=[*option])
        return {run.variant.method for run in plan("few-shot", flags).runs}

    taught = [name for name in METHODS if method_class(name).required_option == "teacher"]
    teachers = [f"{name}.teacher=ViT-L-14" for name in taught]
    assert planned("all") == {*METHODS} - {"coprompt", "ipo", *taught} and "coprompt" not in planned("table1")
    needed = "coprompt.sentences={dataset}.json", "ipo.proposals={dataset}.txt", *teachers
    assert planned("all", "mini") == {*METHODS} == planned("all", "paper", *needed)
    assert "mocoop" in planned("table1") and {"mocoop", "caspl", "ipo", "coprompt"} < planned("table1", "mini")
    asked = "ipo.endpoint=http://localhost/v1", "ipo.model=m"
    assert "ipo" in planned("all", "paper", *asked), "an endpoint proposes instead of a file"
    assert planned("coprompt,mma") == {"coprompt", "mma"}, "a named method is refused by its training"
    with pytest.warns(
        UserWarning, match="--methods all leaves out coprompt, whose training needs --option coprompt.sent"
    ):
        assert main(["train", "--methods", "all", "--datasets", "shapes", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "/mma/" in out and "/coprompt/" not in out


def shots_of(words: str, name: str = "base-to-novel") -> list[tuple[str, int]]:
    flags = SuiteFlags(methods="zeroshot,procap", shots=words, seeds="1")
    planned = plan(name, flags)
    recorded = json.loads(json.dumps(planned.options.to_json()))
    assert SuiteOptions.from_json(recorded, data=HERE) == planned.options
    first = [entry for entry in planned.runs if entry.dataset == planned.runs[0].dataset]
    return [(entry.variant.method, entry.spec.config.shots) for entry in first]


def test_shots_are_those_of_all_runs_or_of_a_curve():
    assert shots_of("") == [("zeroshot", 16), ("procap", 16)]
    assert shots_of("4") == [("zeroshot", 16), ("procap", 4)]
    assert shots_of("full") == [("zeroshot", 16), ("procap", 0)]
    assert [shots for _, shots in shots_of("", "few-shot")] == [16, 1, 2, 4, 8, 16]
    assert shots_of("3,1", "few-shot") == [("zeroshot", 16), ("procap", 1), ("procap", 3)]
    assert shots_of("4", "qualitative") == [("zeroshot", 16), ("procap", 4)]


def test_runs_of_several_suites_are_merged_with_all_their_targets(tmp_path):
    plans = [plan(name, SuiteFlags(), tmp_path) for name in ("cross-dataset", "domain-generalization")]
    specs = merge_runs(plans)
    assert len(specs) == len(plans[0].runs) == len(plans[1].runs)
    assert all(f"{target}:all:test" in specs[0].targets for target in ("shapes", "tiles", "shapes-art"))


def test_the_profile_is_that_of_the_packed_data_and_generated_data_by_default_and_says_so(tmp_path, capsys):
    def chosen(flags):
        return plan("base-to-novel", flags, tmp_path).options

    assert chosen(SuiteFlags()).datasets == MINI.datasets
    assert capsys.readouterr().err == "profile mini, generated data: --data has no data set of the paper\n"
    with pytest.raises(UsageError, match=r"there is no folder .*misspelled; --profile mini makes"):
        plan("base-to-novel", SuiteFlags(), tmp_path / "misspelled")
    assert chosen(SuiteFlags(profile="mini", seeds="4")).seeds == (4,)
    with pytest.raises(UsageError, match="mini"):
        chosen(SuiteFlags(profile="mimi"))
    assert chosen(SuiteFlags(datasets="eurosat")).profile is PAPER
    assert chosen(SuiteFlags(datasets="tiles")).profile is MINI
    for name in ("digits", "dtd"):
        assert chosen(SuiteFlags()).profile is MINI
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")
    assert chosen(SuiteFlags()).profile is PAPER
    assert chosen(SuiteFlags(datasets="tiles,digits")).profile is MINI
    capsys.readouterr()
    assert chosen(SuiteFlags(profile="mini")).profile is MINI and not capsys.readouterr().err


@pytest.mark.parametrize("profile", PROFILES.values(), ids=lambda profile: profile.name)
@pytest.mark.parametrize("recipe", ["", "published", "procap"])
def test_a_shortened_schedule_is_more_than_its_warm_up(profile, recipe):
    for name in ("base-to-novel", "duration"):
        suite = load_suite(name)
        for more in ({"quick": True}, {"overrides": {"epochs": 1}}):
            options = suite.options(profile, recipe=recipe, methods=("coop", "maple", "procap"), **more)
            for recipe_of_run in (entry.spec.config.recipe for entry in suite.plan(options)):
                assert recipe_of_run.warmup == "none" or recipe_of_run.warmup_epochs < recipe_of_run.epochs
    asked = load_suite("base-to-novel").options(profile, overrides={"epochs": 2, "warmup_epochs": 2})
    found = {entry.variant.method: entry.spec.config.recipe for entry in load_suite("base-to-novel").plan(asked)}
    assert found["procap"].warmup_epochs == 2, "what is asked for is done"


def planned_run(capsys: pytest.CaptureFixture[str], folder: Path, *flags: str) -> dict:
    capsys.readouterr()
    place = ("--data", str(folder / "data"), "--results", str(folder), "--dry-run", "--json")
    assert main(["eval", "--methods", "coop", "--epochs", "2", *flags, *place]) == 0
    [run] = json.loads(capsys.readouterr().out.splitlines()[-1])["runs"]
    return run


def test_a_development_run_is_evaluated_on_val_and_never_on_test(capsys, tmp_path):
    run = planned_run(capsys, tmp_path, "--datasets", "digits", "--classes", "dev-base")
    assert run["run"].startswith("dev-base/digits/coop/")
    assert [*run["targets"]] == ["digits:dev-base:val", "digits:dev-novel:val"]


@pytest.mark.parametrize(("file", "runs"), [("readings", 192), ("mmlop_ladder", 60)])
def test_the_example_suites_are_planned(file, runs, capsys):
    path = Path(__file__).parents[1] / "examples" / "suites" / f"{file}.py"
    assert main(["bench", str(path), "--profile", "mini", "--dry-run", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out.splitlines()[-1])["runs"]
    assert len(planned) == runs and all(entry["state"] == "new" for entry in planned)


@pytest.mark.parametrize(("methods", "field", "code"), [
    ("probe,coop", "lr=0.5", 0), ("zeroshot,probe", "lr=0.5", 2), ("coop,maple", "vision_lr=0.5", 2),
    ("coop,skipt", "vision_lr=0.5", 0), ("coop,maple", "eps=1e-3", 2),
    ("skipt", "drop_last=false", 2), ("coop,skipt", "drop_last=false", 0),
])  # fmt: skip
def test_a_recipe_field_is_refused_where_none_of_the_methods_reads_it(methods, field, code, capsys):
    for command in ("train", "sweep"):
        words = command, "--methods", methods, "--datasets", "digits", "--recipe-field", field, "--dry-run"
        ended, _, err = run(capsys, *words)
        assert ended == code and ("is not read by" in err) == bool(code), err


def test_a_sweep_over_a_field_that_its_method_does_not_read_is_refused(capsys):
    words = "sweep", "--methods", "probe", "--datasets", "digits", "--param", "lr=0.1,0.5", "--dry-run"
    code, _, err = run(capsys, *words)
    assert code == 2 and "lr = 0.1 is not read by probe in this recipe" in err


def test_the_docs_say_which_field_is_read_under_which_other_one():
    text = Path(__file__).parents[1].joinpath("docs/training.md").read_text()
    sentence = " ".join(text.split()).partition("methods reads is refused: ")[2].partition(". ")[0]
    said = {}
    for part in sentence.replace("`", "").split("; "):
        names, _, condition = part.partition(" under ")
        said |= dict.fromkeys(names.replace(" is read", "").split(", "), condition)
    assert {name: words for name, words in said.items() if words} == {
        name: f"{field}={' or '.join(values)}" for name, (field, values) in READ_UNDER.items()
    }
