"""A method of one's own: written by `procap new method`, checked by `procap check method`, its mistakes found."""

import json
import sys
import tomllib
from dataclasses import replace

import pytest
from plug_ins import METHOD, install

from benchmarks.cli import main
from benchmarks.experiment.profiles import find_profile
from benchmarks.experiment.titles import title_method
from benchmarks.plots.style import LOOKS, assign_looks
from benchmarks.results.suite_results import SuiteResults
from benchmarks.suites import load_suite
from benchmarks.tables.notes import suite_notes
from procap.methods import method_class

MISTAKES = """
import random
import torch
import torch.nn.functional as F
from functools import partial
from procap.classifier import OnlineClassifier, cosine_logits
from procap.methods.data_use import DataUse
from procap.methods.options import PoolOptions
from own_tokens import OwnTokens
from procap.plan import INPUT, Plan, TokenOp
from procap.methods.clipadapter import ClipAdapter
from procap.methods.probe import NearestMean
from procap.methods.twosfs import TwoSFS
class Noisy(OwnTokens):
    def loss(self, images, labels, noise):
        return {"ce": super().loss(images, labels, noise)["ce"] * torch.rand(())}
class Random(OwnTokens):
    def draw(self, generator):
        return (torch.tensor(random.random()),)
class Unused(OwnTokens):
    def __init__(self, *given):
        super().__init__(*given)
        self.spare = torch.nn.Parameter(torch.zeros(3))
class Forgetful(OwnTokens):
    steps = 0
    def loss(self, images, labels, noise):
        self.steps += 1
        return {"ce": super().loss(images, labels, noise)["ce"] * (1 + self.steps)}
class Narrow(OwnTokens):
    def prompts_of(self, space):
        return self.prompts
class Behind(OwnTokens):
    def features(self, images, noise):
        image, text = super().features(images, noise)
        return image + self.context.mean(), text
class Covering(OwnTokens):
    def plans(self, prompts, noise=None):
        words = self.context.mean().expand(6, self.clip.geometry.text_width)
        return super().plans(prompts, noise)[0], Plan((TokenOp(INPUT, "replace", words, start=1),))
class Failing(OwnTokens):
    def plans(self, prompts, noise=None):
        raise KeyError("tokens")
class Alone(OwnTokens):
    def loss(self, images, labels, noise):
        plans = self.plans(self.prompts, noise)
        image = self.clip.encode_image(images, plans[0])
        text = self.clip.encode_text(self.prompts.tokenized, plans[1])
        return {"ce": F.cross_entropy(cosine_logits(image, text, self.scale()), labels)}
class Shaped(OwnTokens):
    def loss(self, images, labels, noise):
        return {"ce": super().loss(images, labels, noise)["ce"].expand(len(labels))}
class Reading(OwnTokens):
    def loss(self, images, labels, noise):
        terms = super().loss(images, labels, noise)
        return terms if terms["ce"].item() > 0 else {}
class Unaware(OwnTokens):
    def classifier(self):
        return super().classifier()
def centred(features, text, scale):
    return cosine_logits(features - features.mean(dim=0) / 2, text, scale)
class Undeclared(OwnTokens):
    def make_classifier(self, image_plan, text, space):
        head = partial(centred, text=text, scale=self.scale())
        return OnlineClassifier(self.clip, head, len(text), image_plan)
class Foreseeing(Undeclared):
    uses = DataUse(unlabelled="test")
class Unlabelled(OwnTokens):
    Options = type("Options", (OwnTokens.Options, PoolOptions), {})
    learns_unlabelled = True
class Uneven(OwnTokens):
    error = 1.0
    def loss(self, images, labels, noise):
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return {"ce": super().loss(images, labels, noise)["ce"] * (1 + self.error * rank)}
class Steep(Uneven):
    # As by rounding, which steps that are longer than a wave amplify: those at a tenth of the rate, not at a hundredth.
    error = 1e-6
    def loss(self, images, labels, noise):
        waves = 300 / (self.recipe().lr * 1000**2) * (1000 * self.context).cos().sum()
        return {"ce": super().loss(images, labels, noise)["ce"] + waves}
class Headless(ClipAdapter):
    def head(self, space):
        super().head(space)
class Closed(NearestMean):
    def head(self, space):
        super().head(space)
class Endless(TwoSFS):
    title = "Endless"
    def stage_starts(self, steps):
        return 0, steps
for kind in (*OwnTokens.__subclasses__(), Foreseeing, Steep):
    kind.title = kind.__name__
"""
KINDS = ("Noisy", "Random", "Unused", "Forgetful", "Narrow", "Behind", "Covering", "Failing", "Alone",
         "Shaped", "Reading", "Unaware", "Undeclared", "Foreseeing", "Unlabelled", "Uneven", "Steep",
         "Headless", "Closed", "Endless")  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The package that `procap new method own-tokens` writes, and a module of methods with mistakes."""
    folder = tmp_path_factory.mktemp("own")
    assert main(["new", "method", "own-tokens", "--out", str(folder)]) == 0
    package = folder / "own-tokens"
    points = tomllib.loads((package / "pyproject.toml").read_text())["project"]["entry-points"]["procap.methods"]
    install(package, {"mistakes": MISTAKES}, {**points, **{kind.lower(): f"mistakes:{kind}" for kind in KINDS}})
    return package


@pytest.fixture
def check(written, monkeypatch, capsys, few_digits, short_checkpoint):
    """Runs `procap check method` with some checks; returns the exit code and each check's result by its name."""
    monkeypatch.syspath_prepend(written)

    def run(name: str, only: str, backbone: object = short_checkpoint) -> tuple[int, dict[str, dict]]:
        where = ["--dataset", "digits", "--data", str(few_digits), "--backbone", str(backbone), "--json"]
        code = main(["check", "method", name, "--only", only, *where])
        out, err = capsys.readouterr()
        assert f"{name}: {len(only.split(','))} of 8 checks ran, " in err
        return code, {one["name"]: one for one in json.loads(out.splitlines()[-1])["checks"]}

    yield run
    for module in ("own_tokens", "mistakes"):
        sys.modules.pop(module, None)


def test_a_new_method_passes_the_checks_of_one_process(check):
    names = "shapes,inference,gradients,capture,determinism,resume,reloaded"
    code, found = check("own-tokens", names)
    assert (code, [*found]) == (0, names.split(",")) and all(one["passed"] for one in found.values())
    assert found["resume"]["note"].startswith("loss ")
    assert method_class("own-tokens").title == "Own tokens"


@pytest.mark.parametrize(("name", "failing", "note"), [
    ("noisy", "determinism", "not with a global one"),
    ("random", "determinism", "two equal starts or steps differ in"),
    ("unused", "gradients", "no gradient reaches spare"),
    ("forgetful", "resume", "register_buffer"),
    ("endless", "reloaded", "logits of base classes differ by"),
    ("narrow", "shapes", "the classifier of 10 classes gives (4, 5) for 4 images"),
    ("behind", "inference", "features() is replaced, which only loss() calls: inference uses plans(), image_adapter"),
    ("covering", "inference", "classes have equal logits: the text plan replaces the rows of their names"),
    ("undeclared", "inference", 'declare uses = DataUse(unlabelled="test")'),
    ("unlabelled", "inference", 'declare uses = DataUse(labelled="none"'),
    ("foreseeing", "inference", "without the next one of the stream"),
    ("failing", "gradients", "method 'failing' (plug-in) fails in "),
    ("headless", "shapes", "head() of method 'headless' must return a map of features to logits"),
    ("closed", "resume", "head() of method 'closed' must return a map of features to logits"),
    ("shaped", "shapes", "loss term 'ce' of method 'shaped' has the shape [4], a tensor without shape is needed"),
    ("unaware", "shapes", "classifier() takes 1 positional argument"),
])  # fmt: skip
def test_a_mistake_is_found_by_its_check(check, name, failing, note):
    code, found = check(name, failing)
    assert code == 1 and not any(one["passed"] for one in found.values()) and note in [*found.values()][-1]["note"]
    # An error of the method has a traceback for `-v`, a check that found something has none.
    assert ("Traceback" in [*found.values()][-1]["trace"]) == (name in ("failing", "unaware"))


def test_an_operation_that_stops_a_cuda_graph_is_named_with_its_line(check):
    """It costs speed alone, so the check passes."""
    code, found = check("reading", "capture")
    note = found["capture"]["note"]
    assert code == 0 and note.startswith(
        "a GPU runs steps eagerly: the host waits for the result of aten._local_scalar"
    )
    assert "mistakes.py, line " in note
    assert "can be CUDA graphs" in check("own-tokens", "capture")[1]["capture"]["note"]


@pytest.mark.slow
def test_two_processes_are_those_of_one_unless_a_loss_encodes_images_itself(check):
    for name in ("own-tokens", "steep", "tipadapter"):
        code, checks = check(name, "processes")
        assert code == 0, checks
    for name, why in (("alone", "method 'alone' (plug-in) fails in "), ("uneven", "context differs by ")):
        code, checks = check(name, "processes")
        note = checks["processes"]["note"]
        assert code == 1 and note.startswith(why) and "gather_batch" in note


@pytest.mark.slow
@pytest.mark.parametrize("name", ["procap", "2sfs", "skipt", "cocoop", "mmrl"])
def test_methods_of_this_program_pass_all_checks(check, name):
    from runner.method_check import CHECKS

    code, found = check(name, ",".join(CHECKS), "mini")
    assert code == 0, [one for one in found.values() if not one["passed"]]


LOOK = """
from procap.recipe import Recipe
class Painted(CoOp):
    title, colour = "Painted CoOp", "#0072b2"
    @classmethod
    def recipe(cls, task="base-to-novel", shots=16, dataset=""):
        return Recipe(optimizer="adam", lr=0.25, epochs=7, batch_size=5)
class Same(Painted):
    title = "ProCAP"
"""


@pytest.fixture
def painted(tmp_path, monkeypatch):
    points = {name.lower(): f"painted_method:{name}" for name in ("Painted", "Same")}
    install(tmp_path / "lib", {"painted_method": METHOD + LOOK}, points)
    monkeypatch.syspath_prepend(tmp_path / "lib")


def test_suites_on_generated_data_train_a_plug_in_in_its_own_recipe_and_list_it(painted, tmp_path):
    suite, more = load_suite("base-to-novel"), {"methods": ("coop", "painted"), "datasets": ("digits",), "seeds": (1,)}
    done = SuiteResults.read(suite, suite.options(find_profile("mini"), **more), tmp_path)
    details = suite_notes(done).details
    assert any(sentence.startswith("CoOp: optimizer adamw, lr 0.04, epochs 10, batch_size 16") for sentence in details)
    assert any(sentence.startswith("Painted CoOp: optimizer adam, lr 0.25, epochs 7") for sentence in details)
    note = "OWN RECIPE, others in ProCAP's: Painted CoOp (optimizer adam, lr 0.25, epochs 7, batch_size 5)."
    assert any(note in line for line in suite_notes(done).lines)
    # A number of epochs changes no one's recipe.
    shorter = replace(done.options, methods=("coop", "painted", "clipadapter"), overrides={"epochs": 3})
    lines = str(suite_notes(SuiteResults.read(suite, shorter, tmp_path)).lines)
    assert "Painted CoOp (optimizer adam, lr 0.25, epochs 3, batch_size 5), CLIP-Adapter." in lines
    options = replace(done.options, recipe="procap")
    assert "OWN RECIPE" not in str(suite_notes(SuiteResults.read(suite, options, tmp_path)).lines)
    quick = suite.options(find_profile("mini"), quick=True, **more)
    assert [run.spec.config.recipe.epochs for run in suite.plan(quick)] == [2, 2]


def test_a_plug_in_has_its_title_and_colour_and_no_colour_or_title_twice(painted):
    assert title_method("same") == "same"
    assert (title_method("painted"), title_method("coop"), title_method("gone")) == ("Painted CoOp", "CoOp", "gone")
    looks = assign_looks({"unknown": "gone", "Painted CoOp": "painted", "another": "painted", "CoOp": "coop"})
    assert looks["Painted CoOp"].colour == "#0072b2" and looks["CoOp"] == LOOKS["coop"]
    assert len(set(looks.values())) == 4
    looks = assign_looks({"MaPLe": "maple", "ProCAP": "procap", "Painted CoOp": "painted"})
    assert len({look.marker for look in looks.values()}) == 3


@pytest.mark.parametrize(("words", "message"), [
    (["new", "method", "My_Method"], "lower-case letters, digits and dashes, as in my-method"),
    (["new", "method", "maple"], "there is a method or group 'maple' already"),
    (["new", "method", "all"], "there is a method or group 'all' already"),
    (["check", "method", "mapel"], "did you mean maple"),
    (["check", "method", "maple", "--only", "resumed"], "unknown check 'resumed': did you mean resume"),
    (["check", "method", "zeroshot"], "zeroshot trains nothing"),
])  # fmt: skip
def test_wrong_words_are_answered_in_one_line(words, message, capsys, at_home, few_digits):
    more = [] if words[0] == "new" else ["--data", str(few_digits), "--dataset", "digits"]
    assert main([*words, *more]) == 2 and message in capsys.readouterr().err
