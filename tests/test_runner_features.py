"""Image features of a test split are computed once for all methods that read them, and change no answer."""

import dataclasses
import json
import os
from collections.abc import Callable

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from small_runs import make_runtime

from procap.classifier import Classifier
from procap.clip import CLIP
from procap.plan import Plan
from runner.config import RunConfig, RuntimeConfig, Target, plan_run
from runner.evaluate import evaluate
from runner.features import FeatureStore, reads_plain_features
from runner.predictions import Predictions
from runner.run_folders import RunFolder
from runner.train import train
from shards.reader import Split

ALL, BASE, NOVEL = (Target("digits", half) for half in ("all", "base", "novel"))
TEXT_ONLY = ("zeroshot", "coop", "cocoop")
PROMPTED = ("maple", "procap")
KEY = {
    "dataset": "digits", "split": "test", "manifest": "m" * 16, "backbone": "b" * 16, "transform": "resize",
    "precision": "fp32", "device": "cpu", "torch_version": "2.11", "pillow_version": "12",
}  # fmt: skip


@pytest.fixture(scope="module")
def plan(short_checkpoint):
    def make(method: str, **more) -> RunConfig:
        quick = {"epochs": 1, "batch_size": 5, "lr": 0.1, "warmup": "none", "test_batch_size": 8}
        fields = {"dataset": "digits", "shots": 1, "backbone": str(short_checkpoint), "overrides": quick, **more}
        return plan_run(method=method, options={"depth": 3} if method in PROMPTED else {}, **fields)

    return make


@pytest.fixture(scope="module")
def without(few_digits, plan, tmp_path_factory) -> RuntimeConfig:
    """Every method, trained; evaluations there use no features of each other."""
    runtime = make_runtime(few_digits, tmp_path_factory.mktemp("results"))
    for method in (*TEXT_ONLY, *PROMPTED):
        train(plan(method), runtime)
    return runtime


@pytest.fixture
def runtime(without, tmp_path) -> RuntimeConfig:
    return dataclasses.replace(without, features=tmp_path / "features")


@pytest.fixture
def answer(monkeypatch):
    """Evaluates, whatever was counted before; gives the result and the logits in the order of the target."""

    def evaluated(config, target, runtime, **how):
        RunFolder(runtime.results / config.path).eval_file(target).unlink(missing_ok=True)
        seen: list[tuple[np.ndarray, torch.Tensor]] = []
        add = Predictions.add
        with monkeypatch.context() as patch:
            patch.setattr(
                Predictions, "add", lambda self, logits, at: (seen.append((at, logits)), add(self, logits, at))[1]
            )
            result = evaluate(config, target, runtime, **how)
        places = np.concatenate([at for at, _ in seen])
        logits = torch.cat([batch for _, batch in seen])[torch.from_numpy(places >= 0)]
        return result, logits[torch.from_numpy(np.argsort(places[places >= 0]))]

    return evaluated


@pytest.fixture
def decoded(monkeypatch) -> list[int]:
    found: list[int] = []
    image = Split.image
    monkeypatch.setattr(Split, "image", lambda split, i: (found.append(int(split.positions[i])), image(split, i))[1])
    return found


def files(runtime):
    assert runtime.features
    return sorted(runtime.features.glob("*.safetensors"))


@pytest.mark.parametrize(("method", "precision"), [*((method, "fp32") for method in TEXT_ONLY), ("coop", "bf16")])
def test_not_a_bit_of_any_logit_changes(plan, without, runtime, answer, decoded, method, precision):
    config = plan(method, precision=precision)
    train(config, without)
    plain, wanted = answer(config, NOVEL, without)
    assert plain.features == "computed"
    first, computed = answer(config, NOVEL, runtime)
    assert first.features == "computed" and first.images_per_second and first.images_per_second_model
    decoded.clear()
    again, cached = answer(config, NOVEL, runtime)
    assert again.features == "cached" and not decoded
    assert torch.equal(computed, wanted) and torch.equal(cached, wanted)
    assert plain.per_class == first.per_class == again.per_class


def test_one_computation_serves_all_methods_that_prompt_the_text_alone(plan, without, runtime, answer, monkeypatch):
    wanted = {method: answer(plan(method), ALL, without) for method in TEXT_ONLY}
    answer(plan("zeroshot"), ALL, runtime)
    monkeypatch.setattr(CLIP, "encode_image", None)
    monkeypatch.setattr(Split, "image", None)
    for method in TEXT_ONLY:
        result, logits = answer(plan(method), ALL, runtime)
        assert result.features == "cached"
        assert result.per_class == wanted[method][0].per_class and torch.equal(logits, wanted[method][1])
    assert len(files(runtime)) == 1


@pytest.mark.parametrize("method", PROMPTED)
def test_methods_with_prompts_in_the_image_tower_use_no_stored_features(plan, runtime, answer, decoded, method):
    answer(plan("zeroshot"), ALL, runtime)
    [file] = files(runtime)
    before = file.read_bytes()
    decoded.clear()
    result, _ = answer(plan(method), ALL, runtime)
    assert result.features == "computed" and result.images_per_second and "features" not in result.phases
    assert len(decoded) == result.total and file.read_bytes() == before


def test_the_classifier_decides_and_a_plug_in_that_looks_at_images_itself_is_left_alone(tiny_clip, tiny_geometry):
    class Looks(Classifier):
        def __call__(self, images: torch.Tensor) -> torch.Tensor:
            return super().__call__(images.flip(-1))

    class Adapts(Classifier):
        def logits(self, features: torch.Tensor) -> torch.Tensor:
            return super().logits(2 * features)

    class_features, scale = torch.eye(5, tiny_geometry.embed_dim), torch.tensor(100.0)
    plain, looks, adapts = (kind(tiny_clip, Plan(), class_features, scale) for kind in (Classifier, Looks, Adapts))
    assert reads_plain_features(plain, tiny_clip) and reads_plain_features(adapts, tiny_clip)
    assert not reads_plain_features(looks, tiny_clip)
    assert not reads_plain_features(plain, CLIP.random(tiny_geometry, seed=0))
    assert not reads_plain_features(lambda images: images, tiny_clip)


def test_halves_and_limits_share_stored_features(plan, without, runtime, answer, decoded):
    config = plan("coop")
    base, _ = answer(config, BASE, runtime)
    few, _ = answer(config, ALL, dataclasses.replace(runtime, limit=20))
    decoded.clear()
    result, logits = answer(config, ALL, runtime)
    assert (base.features, few.features, result.features) == ("computed", "mixed", "mixed")
    assert result.images_per_second is None and result.images_per_second_model is None
    assert len(set(decoded)) == len(decoded) < result.total - base.total
    assert answer(config, NOVEL, runtime)[0].features == "cached"
    plain, wanted = answer(config, ALL, without)
    # An image in another batch is rounded otherwise: by units in the last place of a scale of 100.
    assert torch.allclose(logits, wanted, rtol=0, atol=1e-4) and result.per_class == plain.per_class


def test_force_computes_again_and_replaces_stored_features(plan, without, runtime, answer, decoded, tiny_geometry):
    config, wide = plan("zeroshot"), tiny_geometry.embed_dim
    answer(config, BASE, runtime)
    [file] = files(runtime)
    sound = file.read_bytes()
    _, wanted = answer(config, BASE, without)
    false = FeatureStore(file.parent, read_key(file))
    at = load_file(file)["positions"]
    false.add(torch.ones(len(at), wide), at)
    false.save()
    misled, wrong = answer(config, BASE, runtime)
    assert misled.features == "cached" and not torch.equal(wrong, wanted)
    decoded.clear()
    forced, right = answer(config, BASE, runtime, force=True)
    assert forced.features == "computed" and forced.images_per_second and len(decoded) == forced.total
    assert torch.equal(right, wanted) and file.read_bytes() == sound


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_on_a_gpu_kept_features_give_the_same_answers(plan, without, runtime, answer, precision):
    config = plan("coop", precision=precision)
    train(config, without)
    answer(config, ALL, runtime)
    there = dataclasses.replace(runtime, device="cuda")
    first, computed = answer(config, ALL, there)
    again, cached = answer(config, ALL, there)
    assert (first.features, again.features) == ("computed", "cached") and len(files(runtime)) == 2
    assert torch.allclose(computed, cached, rtol=0, atol=1e-4) and first.per_class == again.per_class


@pytest.mark.parametrize("field", KEY)
def test_everything_that_changes_features_has_a_file_of_its_own(field, tmp_path):
    own = FeatureStore(tmp_path, KEY).path
    assert FeatureStore(tmp_path, {**KEY, field: "other"}).path != own == FeatureStore(tmp_path, dict(KEY)).path


def put(folder, positions, value=1.0, width=4):
    store = FeatureStore(folder, KEY)
    remember(store, positions, value, width)
    store.save()
    return store


def remember(store: FeatureStore, positions: list[int], value: float = 1.0, width: int = 4) -> None:
    features = value * torch.tensor(positions)[:, None].expand(-1, width)
    store.add(features, np.array(positions))


def read_key(file):
    data = file.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return json.loads(header["__metadata__"]["procap"])["key"]


def test_processes_that_write_at_once_lose_nothing(tmp_path):
    def work(first: int) -> None:
        for position in range(first, 40, 4):
            put(tmp_path, [position])

    children = [forked(lambda first=first: work(first)) for first in range(4)]
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    assert FeatureStore(tmp_path, KEY).load(np.arange(40))[:, 0].tolist() == list(range(40))


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "a flipped bit of a feature": lambda data: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
    "cut short": lambda data: data[: len(data) // 2],
    "nothing": lambda data: b"",
    "another file": lambda data: b"not a tensor in sight" * 99,
    "no description": lambda data: data.replace(b'"procap"', b'"capper"'),
    "of other weights": lambda data: data.replace(b"backbone", b"backbame"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_file_is_replaced_with_a_warning(tmp_path, damage):
    file = put(tmp_path, [1, 2, 3]).path
    sound = file.read_bytes()
    file.write_bytes(damage(sound))
    assert file.read_bytes() != sound
    with pytest.warns(UserWarning, match=r"cannot be used .*computed again") as notes:
        store = FeatureStore(tmp_path, KEY)
    [said] = own(notes)
    assert "\n" not in said and not store.contains(np.arange(4)).any()
    remember(store, [1, 2, 3])
    store.save()
    assert file.read_bytes() == sound


def test_features_that_are_not_finite_are_never_kept(tmp_path):
    store = FeatureStore(tmp_path, KEY)
    encoded = torch.tensor([[1.0, 2.0], [float("nan"), 0.0], [0.0, float("inf")]])
    store.add(encoded, np.arange(3))
    store.save()
    assert FeatureStore(tmp_path, KEY).contains(np.arange(3)).tolist() == [True, False, False]


def test_a_read_only_folder_is_a_warning(plan, runtime, answer):
    assert runtime.features
    runtime.features.write_text("a file in its runtime")
    with pytest.warns(UserWarning, match="cannot be stored") as notes:
        result, _ = answer(plan("zeroshot"), BASE, runtime)
    assert len(own(notes)) == 1 and result.features == "computed"


def own(notes):
    """What the project warns of; what is thrown away just then may have a warning as well."""
    return [str(note.message) for note in notes if note.category is UserWarning]


def forked(work: Callable[[], None]) -> int:
    """The id of a process that does `work` and ends with 0, or with 1 where it raises."""
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    finally:
        os._exit(1)
