"""What was published: recipes, rates of every epoch, options for departures of public code, and its checkpoints."""

import math
import os
import warnings

import pytest
import torch
from small_runs import seeded
from tiny_geometry import SHORT_OPTIONS, UNTRAINED
from torch import nn

from procap import errors, teacher, text
from procap.clip import CLIP
from procap.methods import METHODS, build_method, method_class, method_options, public
from procap.methods.public import PublicFile, pack_public, public_names, read_public
from procap.recipe import Recipe, epoch_rate, step_rate, warmup_warning
from runner.planning import plan_run

DASSL = {"optimizer": "sgd", "weight_decay": 5e-4, "momentum": 0.9, "warmup": "constant", "warmup_lr": 1e-5}
DASSL |= {"warmup_epochs": 1, "schedule": "epoch", "batches": "random", "drop_last": True, "crop_scale": (0.08, 1.0)}
DASSL |= {"betas": (0.9, 0.999), "eps": 1e-8, "flip": True, "augmentation": "crop", "test_batch_size": 100}
"""What the public trainers do unless their configurations say otherwise."""

PROCAP = {"optimizer": "adamw", "weight_decay": 0.03, "warmup": "linear", "warmup_epochs": 3, "crop_scale": (0.8, 1.0)}
MMRL = {"optimizer": "adamw", "crop_scale": (0.5, 1.0), "test_batch_size": 250}
GALLOP = {"weight_decay": 0.01, "warmup": "none"}
TWO_STAGES = {"optimizer": "adamw", "weight_decay": 0.01, "drop_last": False, "test_batch_size": 32, "warmup": "none"}
TWO_STAGES |= {"schedule": "step", "min_lr": 1e-6, "epochs": 10}
FEATURES = {"warmup": "none", "drop_last": False}
TIP = {**FEATURES, "crop_scale": (0.5, 1.0), "optimizer": "adamw", "eps": 1e-4, "weight_decay": 0.01}
TIP |= {"schedule": "step"}
ONE_CLASS = {"batches": "class", "warmup_lr": 1e-6}

OWN = [
    # method, task, shots, data set, learning rate, epochs, batch; and what differs from `DASSL`
    ("coop", "base-to-novel", 16, "dtd", 0.002, 200, 32, {}),
    ("coop", "base-to-novel", 16, "imagenet", 0.002, 50, 32, {}),
    ("coop", "cross-dataset", 16, "imagenet", 0.002, 50, 32, {}),
    ("coop", "few-shot", 1, "dtd", 0.002, 50, 32, {}),
    ("coop", "few-shot", 2, "dtd", 0.002, 100, 32, {}),
    ("coop", "few-shot", 4, "dtd", 0.002, 100, 32, {}),
    ("coop", "few-shot", 8, "dtd", 0.002, 200, 32, {}),
    ("coop", "few-shot", 16, "imagenet", 0.002, 50, 32, {}),
    ("cocoop", "base-to-novel", 16, "dtd", 0.002, 10, 1, {}),
    ("cocoop", "cross-dataset", 16, "imagenet", 0.002, 10, 1, {}),
    ("kgcoop", "base-to-novel", 16, "imagenet", 0.002, 100, 128, {}),
    ("kgcoop", "few-shot", 4, "dtd", 0.002, 100, 128, {}),
    ("vpt", "base-to-novel", 16, "dtd", 0.0025, 5, 4, {}),
    ("ivlp", "base-to-novel", 16, "dtd", 0.0035, 5, 4, {}),
    ("ivlp", "cross-dataset", 16, "imagenet", 0.0035, 5, 4, {}),
    ("maple", "base-to-novel", 16, "dtd", 0.0035, 5, 4, {}),
    ("maple", "cross-dataset", 16, "imagenet", 0.0026, 2, 4, {}),
    ("maple", "domain-generalization", 16, "imagenet", 0.0026, 2, 4, {}),
    ("promptsrc", "base-to-novel", 16, "dtd", 0.0025, 20, 4, {"average": (15, 1)}),
    ("promptsrc", "cross-dataset", 16, "imagenet", 0.0025, 20, 4, {"average": (6, 10)}),
    ("promptsrc", "few-shot", 1, "dtd", 0.0025, 50, 4, {"average": (45, 5)}),
    ("promptsrc", "few-shot", 16, "ucf101", 0.0025, 50, 4, {"average": (30, 30)}),
    ("coprompt", "base-to-novel", 16, "dtd", 0.0035, 8, 4, {"augmentation": "randaugment"}),
    ("coprompt", "base-to-novel", 16, "food101", 0.0035, 5, 4, {"augmentation": "randaugment"}),
    ("tcp", "base-to-novel", 16, "dtd", 0.002, 50, 32, {"optimizer": "adam", "eps": 1e-3, "test_batch_size": 500}),
    ("tcp", "base-to-novel", 16, "sun397", 0.002, 25, 32, {"optimizer": "adam", "eps": 1e-3, "test_batch_size": 500}),
    ("mma", "base-to-novel", 16, "dtd", 0.0015, 5, 16, {"warmup": "none"}),
    ("mma", "cross-dataset", 16, "imagenet", 0.0015, 5, 128, {"warmup": "none"}),
    ("mmrl", "base-to-novel", 16, "dtd", 0.001, 10, 4, MMRL),
    ("mmrl", "base-to-novel", 16, "imagenet", 0.001, 5, 32, MMRL),
    ("mmrl", "few-shot", 1, "dtd", 0.001, 50, 32, MMRL),
    ("mmrl", "few-shot", 16, "imagenet", 0.001, 5, 32, MMRL),
    ("mmrl", "cross-dataset", 16, "imagenet", 0.001, 1, 32, {**MMRL, "warmup": "none"}),
    ("2sfs", "base-to-novel", 16, "dtd", 2e-4, 10, 32, {**TWO_STAGES, "iterations": 4800}),
    ("2sfs", "few-shot", 1, "dtd", 2e-4, 10, 32, {**TWO_STAGES, "iterations": 300}),
    ("skipt", "base-to-novel", 16, "dtd", 2e-5, 20, 4, {**ONE_CLASS, "vision_lr": 5e-6}),
    ("skipt", "base-to-novel", 16, "food101", 2e-5, 5, 4, {**ONE_CLASS, "vision_lr": 5e-6}),
    ("skipt", "cross-dataset", 16, "imagenet", 1e-5, 5, 4, {**ONE_CLASS, "vision_lr": 1e-6, "warmup_lr": 1e-8}),
    ("skipt", "few-shot", 4, "dtd", 1e-5, 40, 4, {**ONE_CLASS, "warmup": "none"}),
    ("skipt", "few-shot", 2, "sun397", 1e-5, 10, 4, {**ONE_CLASS, "warmup": "none", "batches": "random"}),
    ("probe", "few-shot", 16, "dtd", 1e-3, 1, 256, FEATURES),
    ("ncm", "few-shot", 16, "dtd", 1e-3, 1, 256, FEATURES),
    ("tipadapter", "few-shot", 16, "dtd", 1e-3, 1, 256, {**FEATURES, "crop_scale": (0.5, 1.0)}),
    ("tipadapterf", "few-shot", 16, "dtd", 1e-3, 20, 256, TIP),
    ("tipadapterf", "few-shot", 1, "eurosat", 1e-3, 100, 256, TIP),
    ("lppp", "few-shot", 16, "dtd", 1e-3, 1, 256, {**FEATURES, "crop_scale": (0.5, 1.0)}),
    ("gda", "few-shot", 16, "dtd", 1e-3, 1, 256, {**FEATURES, "crop_scale": (0.5, 1.0)}),
    ("gda", "base-to-novel", 16, "imagenet", 1e-3, 1, 256, FEATURES),
    ("sstext", "few-shot", 16, "dtd", 1e-3, 1, 256, FEATURES),
    ("ipo", "base-to-novel", 1, "dtd", 1e-3, 1, 256, FEATURES),
    ("crossmodal", "few-shot", 16, "dtd", 1e-3, 1, 256, FEATURES),
    ("clap", "few-shot", 16, "imagenet", 0.1, 300, 256, {"weight_decay": 0.0}),
    ("prolip", "base-to-novel", 16, "dtd", 1e-5, 300, 100_000, {**TIP, "optimizer": "adam", "weight_decay": 0.0}),
    ("clipadapter", "few-shot", 16, "dtd", 0.002, 50, 32, {}),
    ("taskres", "few-shot", 4, "dtd", 0.002, 100, 256, {"optimizer": "adam"}),
    ("taskres", "few-shot", 16, "imagenet", 2e-4, 200, 256, {"optimizer": "adam"}),
    ("cliplora", "few-shot", 4, "dtd", 2e-4, 10, 32, {**TWO_STAGES, "iterations": 2000, "test_batch_size": 256}),
    ("prograd", "few-shot", 4, "dtd", 0.002, 100, 32, {}),
    ("prograd", "base-to-novel", 4, "imagenet", 0.002, 50, 32, {}),
    ("bpl", "base-to-novel", 16, "eurosat", 0.002, 60, 1, {}),
    ("bpl", "cross-dataset", 16, "imagenet", 0.002, 10, 1, {}),
    ("dept", "base-to-novel", 16, "dtd", 0.0035, 10, 4, {}),
    ("dept-maple", "base-to-novel", 16, "dtd", 0.0035, 10, 4, {}),
    ("aapl", "base-to-novel", 16, "dtd", 0.002, 10, 1, {}),
    ("rebapl", "base-to-novel", 16, "dtd", 0.002, 15, 1, {}),
    ("dpc", "base-to-novel", 16, "dtd", 0.002, 20, 4, {}),
    (
        "mocoop",
        "base-to-novel",
        16,
        "dtd",
        0.032,
        25,
        32,
        {"warmup_epochs": 3, "grad_clip": 1.0, "test_batch_size": 32},
    ),
    ("tpt-coop", "base-to-novel", 16, "dtd", 0.002, 200, 32, {"test_batch_size": 512}),
    ("kdpl", "base-to-novel", 16, "dtd", 0.002, 50, 32, {}),
    ("kdpl-maple", "base-to-novel", 16, "dtd", 0.0035, 5, 4, {}),
    ("promptkd", "base-to-novel", 16, "dtd", 0.005, 20, 8, {}),
    ("caspl-boost", "base-to-novel", 16, "dtd", 0.0025, 20, 4, {}),
    ("caspl-boost", "domain-generalization", 16, "imagenet", 0.0025, 20, 128, {}),
    ("caspl", "base-to-novel", 16, "dtd", 0.002, 50, 32, {}),
    ("caspl", "domain-generalization", 16, "imagenet", 0.0035, 10, 4, {}),
    ("caspl-maple", "base-to-novel", 16, "dtd", 0.0035, 5, 4, {}),
    ("caspl-maple", "domain-generalization", 16, "imagenet", 0.0026, 2, 4, {}),
    ("caspl-promptsrc", "base-to-novel", 16, "dtd", 0.0025, 20, 4, {"average": (15, 1)}),
    ("caspl-promptsrc", "few-shot", 1, "dtd", 0.0025, 50, 4, {"average": (45, 5)}),
    ("mmrlpp", "base-to-novel", 16, "dtd", 0.001, 10, 4, MMRL),
    ("mmrlpp", "few-shot", 1, "dtd", 0.002, 100, 32, MMRL),
    ("mmlop", "base-to-novel", 16, "dtd", 0.0025, 30, 4, {}),
    ("plotpp", "few-shot", 1, "dtd", 0.002, 100, 32, {}),
    ("plotpp", "few-shot", 4, "dtd", 0.002, 200, 32, {}),
    ("plotpp", "few-shot", 16, "dtd", 0.002, 400, 32, {}),
    ("plotpp", "few-shot", 4, "imagenet", 0.002, 100, 32, {}),
    ("gallop", "base-to-novel", 16, "dtd", 0.002, 200, 32, GALLOP),
    ("gallop", "few-shot", 1, "eurosat", 0.002, 200, 10, GALLOP),
    ("gallop", "domain-generalization", 16, "imagenet", 0.002, 50, 128, GALLOP),
    ("mmlop", "few-shot", 1, "dtd", 0.0025, 50, 4, {}),
    ("mmlop", "domain-generalization", 16, "imagenet", 0.0025, 50, 4, {}),
    ("procap", "base-to-novel", 16, "dtd", 2.5e-4, 50, 32, PROCAP),
    ("procap", "few-shot", 1, "imagenet", 2.5e-4, 50, 32, PROCAP),
]


@pytest.mark.parametrize("case", OWN, ids=lambda case: "-".join(map(str, case[:4])))
def test_each_method_has_its_published_recipe(case):
    method, task, shots, dataset, lr, epochs, batch, changes = case
    fields = {**DASSL, "lr": lr, "epochs": epochs, "batch_size": batch, **changes}
    assert method_class(method).recipe(task, shots, dataset) == Recipe.model_validate(fields)


def test_every_method_has_a_row():
    assert {case[0] for case in OWN} == {*METHODS} - {*UNTRAINED}


def test_methods_have_the_options_published_for_each_task_and_data_set():
    def options(method: str, task: str = "base-to-novel", dataset: str = "dtd") -> dict[str, object]:
        return method_class(method).task_options(task, 16, dataset)

    assert options("mmrl") == options("mmrl", "few-shot") == {"reg_weight": 6.0}
    assert options("mmrl", dataset="eurosat") == {"reg_weight": 0.01, "width": 2048}
    assert options("mmrl", "cross-dataset", "imagenet") == {"reg_weight": 0.2}
    assert options("coprompt", dataset="food101") == {"depth": 9, "n_ctx": 4, "weight": 0.5}
    assert options("mmrlpp", dataset="digits") == {"fresh": 0.9, "reg_weight": 0.2}
    for task in ("cross-dataset", "domain-generalization"):
        assert options("maple", task) == options("mmlop", task) == {"depth": 3}
        assert options("promptsrc", task) == {"depth": 3, "vision_depth": 3}
    assert options("coop", "few-shot") == {"n_ctx": 16, "ctx_init": ""}
    assert options("skipt") == {"keep_labels": False}
    assert not any(map(options, ("kgcoop", "vpt", "ivlp", "maple", "promptsrc", "tcp", "mma", "2sfs", "mmlop")))


def test_every_method_takes_the_recipe_of_procap():
    """Nothing is left of the method's own: no average over epochs, no second rate, no batches of one class."""
    same = plan_run(method="procap", dataset="dtd").recipe
    for name in {*METHODS} - {*UNTRAINED}:
        config = plan_run(method=name, dataset="dtd", recipe="procap")
        unread = method_class(name).unread_fields(method_options(name, config.options))
        assert config.recipe.model_dump(exclude=unread) == same.model_dump(exclude=unread), name


def test_constant_warmup_then_a_cosine_that_never_arrives():
    """One epoch at 1e-5, then full rate; the last rate over the peak depends on the epochs alone."""
    for epochs, last in ((2, 1.0), (5, 0.3455), (10, 0.0955), (50, 0.0039)):
        recipe = Recipe(lr=0.0035, epochs=epochs, batch_size=4)
        rates = [epoch_rate(recipe, epoch) for epoch in range(epochs)]
        assert rates[:2] == [1e-5, 0.0035] and rates[-1] / 0.0035 == pytest.approx(last, abs=5e-5)


@pytest.mark.parametrize("warmup", ["constant", "linear"])
def test_a_warm_up_per_step_is_that_of_torch_followed_by_a_cosine_to_the_end(warmup):
    start = {"linear": 1e-9, "constant": 1e-5}[warmup]
    fields = {"schedule": "step", "warmup": warmup, "warmup_lr": start}
    recipe = Recipe(lr=0.01, min_lr=1e-4, epochs=4, batch_size=1, **fields)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.01)
    schedules = torch.optim.lr_scheduler
    if warmup == "linear":
        warm = schedules.LinearLR(optimizer, start_factor=start / 0.01, total_iters=5)
    else:
        warm = schedules.ConstantLR(optimizer, factor=start / 0.01, total_iters=5)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=15, eta_min=1e-4)
    after = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], milestones=[5])
    for step in range(20):
        assert step_rate(recipe, step, 20, warm=5) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-9)
        optimizer.step()
        after.step()


@pytest.mark.parametrize("warmup, length", [("none", 1), ("constant", 1), ("constant", 2), ("linear", 3)])
def test_after_warmup_the_rates_are_those_of_torch(warmup, length):
    """Torch's cosine annealing over all epochs, its clock started after the warm-up."""
    recipe = Recipe(lr=0.01, epochs=12, batch_size=1, warmup=warmup, warmup_epochs=length)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.01)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
    for epoch in range(0 if warmup == "none" else length, 12):
        assert math.isclose(epoch_rate(recipe, epoch), optimizer.param_groups[0]["lr"], rel_tol=1e-9)
        optimizer.step()
        cosine.step()


IMAGES, LABELS = torch.randn(3, 3, 32, 32, generator=seeded(1)), torch.tensor([0, 3, 1])


@pytest.fixture
def build(short_clip, tiny_space):
    def build(name, **options):
        needed = {"sentences": "templates"} if name == "coprompt" else {}
        return build_method(name, short_clip, tiny_space, SHORT_OPTIONS.get(name, {}) | needed | options, seeded())

    return build


def terms(method, noise=None):
    return method.loss(IMAGES, LABELS, method.draw(seeded(2)) if noise is None else noise)


def test_mma_gets_the_true_gradient(build):
    scaled, true = build("mma", scale=0.01), build("mma", scale=0.01, scale_gradient=False)
    for method in (scaled, true):
        terms(method)["ce"].backward()
    for (name, one), other in zip(scaled.named_parameters(), true.parameters(), strict=True):
        largest = other.grad.abs().max()
        assert largest > 0 and (other.grad - 0.01 * one.grad).abs().max() <= 1e-3 * largest, name


def test_a_phrase_as_long_as_the_tokens_leaves_no_words_behind_them(build):
    kept, none = (build("maple", **options).prompts.ids.argmax(dim=1) for options in ({}, {"ctx_init": "a photo"}))
    assert torch.equal(kept - none, torch.full_like(kept, 2))


def test_tcp_takes_another_reference(build, short_clip, tiny_space):
    template = "a drawing of a {}."
    reference = build("tcp", reference_template=template).prompts.reference
    assert torch.equal(reference, teacher.text_bank(short_clip, tiny_space, [template]))


PUBLIC = [name for name in METHODS if method_class(name).public_layout]
OPTIONS = {"mmrl": {"width": 16}, "promptkd": {"width": 48}}


class Warmup(torch.optim.lr_scheduler.LRScheduler):
    """A scheduler that holds another one, as Dassl's does."""

    def __init__(self, successor):
        self.successor = successor
        super().__init__(successor.optimizer)

    def get_lr(self) -> list[float]:
        return [1e-5]


def trained_module():
    """A module after one step, and all that Dassl saves of it: the scheduler is an object with the optimizer in it."""
    module = nn.Linear(3, 2).half().float()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    scheduler = Warmup(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5))
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    plain = {name: value for name, value in vars(scheduler).items() if name != "optimizer"}
    own = {"epoch": 5, "optimizer": optimizer.state_dict(), "scheduler": plain, "val_result": 81.5}
    return module, {"state_dict": module.state_dict(), **own}


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_files_of_dassl_are_read_with_live_objects_in_them(tmp_path):
    module, content = trained_module()
    file = tmp_path / "model.pth.tar-5"
    torch.save(content, file)
    found = read_public(file)
    assert found.epoch == 5 and found.tensors.keys() == module.state_dict().keys()
    assert all(torch.equal(found.tensors[name], value) for name, value in module.state_dict().items())


def test_code_in_a_file_does_not_run(tmp_path):
    file, trace = tmp_path / "model.pth.tar-5", tmp_path / "it-ran"
    for content in (trained_module()[1] | {"scheduler": Hostile(trace)}, {"state_dict": {"ctx": Hostile(trace)}}):
        torch.save(content, file)
        with pytest.raises(errors.UserError, match="is refused"):
            read_public(file)
    assert not trace.exists()


@pytest.mark.parametrize("share", [0.1, 0.6, 0.95])
def test_a_damaged_file_is_an_error_of_one_line(tmp_path, share):
    file = tmp_path / "model.pth.tar-5"
    torch.save(trained_module()[1], file)
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
    with pytest.raises(errors.UserError, match="is refused: ") as raised:
        read_public(file)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("format", ["dassl", "safetensors"])
def test_what_is_written_is_read_again_and_needs_no_code(tmp_path, format):
    file = tmp_path / f"model.{'safetensors' if format == 'safetensors' else 'pth.tar-7'}"
    tensors = {"ctx": torch.randn(4, 8)}
    file.write_bytes(pack_public(PublicFile(tensors, 7), format))
    found = read_public(file)
    assert found.epoch == 7 and torch.equal(found.tensors["ctx"], tensors["ctx"])
    if format == "dassl":
        assert torch.load(file, weights_only=True).keys() == trained_module()[1].keys()


def built(name, clip, space, seed=0):
    return build_method(name, clip, space, OPTIONS.get(name, {}), torch.Generator().manual_seed(seed))


def saved(name, clip, space, seed=1):
    """A method, and the state dict that its public trainer would save: fp16, with the buffers and the frozen towers."""
    method = built(name, clip, space, seed)
    layout = method.public_layout
    words = clip.token_embedding(method.prompts.ids)
    if layout.module == "adapter_learner":
        extra = {"token_embedding": words, "tokenized_prompts": method.prompts.ids}
    elif "prompt_learner.ctx" in public_names(method).values():
        n_ctx = public.public_parameters(method)["prompt_learner.ctx"].shape[-2]
        extra = {"token_prefix": words[:, :1], "token_suffix": words[:, 1 + n_ctx :]}
        extra = extra if layout.module else {f"prompt_learner.{key}": value for key, value in extra.items()}
    else:
        extra = {"prompt_embeddings": words} if name in ("mmrl", "mmrlpp") else {}
    if not layout.module:
        extra |= public.frozen_state(clip) | {"logit_scale": clip.logit_scale}
    extra |= {f"{start}weight" if start.endswith(".") else start: torch.ones(2) for start in layout.unused}
    state = extra | public.public_state(method)
    return method, {key: value.half() if value.is_floating_point() else value for key, value in state.items()}


@pytest.mark.parametrize("name", PUBLIC)
def test_state_dicts_of_public_code_become_the_method(tiny_clip, tiny_space, name):
    theirs, state = saved(name, tiny_clip, tiny_space)
    ours = built(name, tiny_clip, tiny_space)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        public.load_public_state(ours, state)
    for key, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], value.half().float()), key


META_NET = {"meta_net.linear1.weight": (3, 48), "meta_net.linear1.bias": (3,), "meta_net.linear2.weight": (64, 3)}

LAYOUTS = {
    "2sfs": ("two_stages", {"visual.transformer.resblocks.0.ln_1.weight": (128,),
                            "transformer.resblocks.1.ln_2.bias": (64,)}),
    "coop": ("prompt_learner", {"ctx": (4, 64)}),
    "tpt-coop": ("prompt_learner", {"ctx": (4, 64)}),
    "cliplora": ("cliplora", {"visual.transformer.resblocks.0.attn.q_proj.w_lora_A": (2, 128)}),
    "prograd": ("prompt_learner", {"ctx": (16, 64)}),
    "bpl": ("prompt_learner", {"prompt_learner.ctx": (4, 64), "prompt_learner.std_posterior": (1, 64)}),
    "dept": ("PromptLearner", {"prompt_learner.ctx": (16, 64), "linear_probe_proj.weight": (5, 48)}),
    "dept-maple": ("MultiModalPromptLearner", {"prompt_learner.ctx": (2, 64), "film_lp_img.scale": (48,)}),
    "mmrlpp": ("MultiModalRepresentationLearner", {"image_encoder.A": (128, 64),
                                                   "representation_learner.srra_r2tproj.srra.6.bias": (64,)}),
    "mocoop": ("prompt_learner", {"prompt_learner.ctx_before_0": (4, 64), "prompt_learner.w": (1, 48)}),
    "plotpp": ("prompt_learner", {"prompt_learner.ctx": (4, 4, 64), "prompt_learner.ctx_vision": (4, 2, 128)}),
    "gallop": ("gallop", {"global_prompt": (4, 4, 64), "local_proj.linear.weight": (128, 128)}),
    "kdpl": ("prompt_learner", {"ctx": (4, 64)}),
    "kdpl-maple": ("MultiModalPromptLearner", {"prompt_learner.ctx": (2, 64)}),
    "promptkd": ("VLPromptLearner", {"image_encoder.VPT": (4, 128), "VPT_image_trans.conv1.1.running_var": (48,),
                                     "VPT_image_trans.conv1.0.weight": (48, 48, 1, 1)}),
    "caspl-boost": ("CasPL", {"prompt_learner_teacher.ctx": (8, 64), "image_encoder.VPT_FIRST": (8, 128)}),
    "caspl": ("prompt_learner", {"prompt_learner.ctx": (8, 64),
                                 "text_encoder.transformer.resblocks.11.VPT_shallow_FIRST": (8, 64)}),
    "caspl-maple": ("MultiModalPromptLearner", {"prompt_learner.ctx": (8, 64), "image_encoder.VPT_FIRST": (8, 128)}),
    "caspl-promptsrc": ("VLPromptLearner", {"image_encoder.transformer.resblocks.11.VPT_shallow": (8, 128),
                                            "image_encoder.transformer.resblocks.11.VPT_shallow_FIRST": (8, 128)}),
    "taskres": ("prompt_learner", {"text_feature_residuals": (5, 48)}),
    "clap": ("adapter", {"prototypes": (5, 48)}),
    "clipadapter": ("clip_adapter", {"fc.0.weight": (12, 48), "fc.2.weight": (48, 12)}),
    "cocoop": ("prompt_learner", {"ctx": (4, 64), **META_NET, "meta_net.linear2.bias": (64,)}),
    "kgcoop": ("prompt_learner", {"ctx": (4, 64)}),
    "maple": ("MultiModalPromptLearner", {"prompt_learner.ctx": (2, 64), "prompt_learner.proj.weight": (128, 64)}),
    "ivlp": ("VLPromptLearner", {"prompt_learner.ctx": (2, 64), "image_encoder.VPT": (2, 128)}),
    "promptsrc": ("VLPromptLearner", {"prompt_learner.ctx": (4, 64),
                                      "text_encoder.transformer.resblocks.8.VPT_shallow": (4, 64)}),
    "vpt": ("prompt_learner", {"image_encoder.VPT": (8, 128)}),
    "coprompt": ("MultiModalPromptLearner", {"prompt_learner.ctx": (4, 64), "adapter_image.fc.0.weight": (12, 48),
                                             "adapter_text.fc.2.weight": (48, 12)}),
    "tcp": ("prompt_learner", {"ctx": (4, 64), "meta_net.linear1.weight": (128, 48)}),
    "mma": ("adapter_learner", {"text_adapter.5.down.0.weight": (32, 64), "shared_adapter.12.0.bias": (32,)}),
    "skipt": ("learnable_params", {"image_encoder.transformer.resblocks.6.mlp.c_fc.weight": (512, 128),
                                   "text_encoder.text_projection": (64, 48)}),
    "mmrl": ("MultiModalRepresentationLearner", {"representation_learner.compound_rep_tokens": (5, 16),
                                                 "image_encoder.proj_rep": (128, 48)}),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC)
def test_exports_have_the_names_and_shapes_of_the_public_code(tiny_clip, tiny_space, name):
    method = built(name, tiny_clip, tiny_space)
    folder, tensors = LAYOUTS[name]
    state = public.public_state(method)
    assert method.public_layout.folder == folder
    assert {key: tuple(state[key].shape) for key in tensors} == tensors
    learned = sum(tensor.numel() for tensor in method.state_dict().values())
    assert sum(tensor.numel() for tensor in state.values()) == learned


def test_another_method_other_options_and_damaged_values_are_refused(tiny_clip, tiny_space):
    _, maple = saved("maple", tiny_clip, tiny_space)
    for name, message in (
        ("ivlp", "lacks"),
        ("promptsrc", r"prompt_learner.ctx is \[2, 64\], expected \[4, 64\]"),
        ("coop", "lacks ctx"),
        ("vpt", "lacks image_encoder.VPT"),
    ):
        with pytest.raises(errors.UserError, match=f"no checkpoint of .* with these options: .*{message}"):
            public.load_public_state(built(name, tiny_clip, tiny_space), maple)
    _, ivlp = saved("ivlp", tiny_clip, tiny_space)
    with pytest.raises(errors.UserError, match="no checkpoint of MaPLe"):
        public.load_public_state(built("maple", tiny_clip, tiny_space), ivlp)
    with pytest.raises(errors.UserError, match="ZeroShot's public code"):
        public.load_public_state(built("zeroshot", tiny_clip, tiny_space), maple)


def test_another_backbone_and_other_classes_are_refused(tiny_clip, tiny_space, tiny_geometry):
    _, state = saved("maple", tiny_clip, tiny_space)
    other = CLIP.random(tiny_geometry, seed=5, name="other")
    with pytest.raises(errors.UserError, match="trained on other weights than those of other: image_encoder"):
        public.load_public_state(built("maple", other, tiny_space), state)
    with pytest.raises(errors.UserError, match="trained on 5 classes, while there are 2 here"):
        public.load_public_state(built("maple", tiny_clip, text.LabelSpace(("cat", "dog"))), state)
    renamed = text.LabelSpace((*tiny_space.classnames[:-1], "dog"))
    for name in ("maple", "mmrl"):
        with pytest.warns(UserWarning, match="other words for 1 of 5 classes, such as 'dog'"):
            public.load_public_state(built(name, tiny_clip, renamed), saved(name, tiny_clip, tiny_space)[1])
    integers = {key: value.long() if key == "prompt_learner.ctx" else value for key, value in state.items()}
    with pytest.raises(errors.UserError, match="ctx is torch"):
        public.load_public_state(built("maple", tiny_clip, tiny_space), integers)


def test_skipt_uses_every_class_at_a_ratio_of_one(build):
    method = build("skipt", top_ratio=1.0, max_top=2)
    assert method.used_ranks(0).tolist() == [0, 1, 2, 3, 4]


def test_the_warning_of_a_long_warm_up_names_the_highest_rate_of_the_schedule():
    changes = {"lr": 1.0, "epochs": 3, "warmup": "linear", "warmup_epochs": 5, "schedule": "epoch"}
    recipe = method_class("maple").recipe().model_copy(update=changes)
    images = 10 * recipe.batch_size
    assert "3 of 3 epochs warm up at a rate of 0.4 or less" in warmup_warning(recipe, images)
    # Three epochs of ten steps: the ramp ends with the training.
    per_step = recipe.model_copy(update={"schedule": "step"})
    assert step_rate(recipe, 29, 30, warm=30) > 0.9 and not warmup_warning(per_step, images)
    for only_step in ({"epochs": 1, "batch_size": images}, {"epochs": 1, "iterations": 1}):
        why = warmup_warning(per_step.model_copy(update=only_step), images)
        assert "1 of 1 epochs warm up at a rate of 1e-05 or less" in why and step_rate(per_step, 0, 1, warm=1) == 1e-5
    two_steps = per_step.model_copy(update={"epochs": 2, "batch_size": images})
    assert "2 of 2 epochs warm up at a rate of 0.5 or less" in warmup_warning(two_steps, images)
    assert step_rate(two_steps, 1, 2, warm=2) == 0.5
