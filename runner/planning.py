"""Plan runs: resolve names, defaults and recipes into a `RunConfig`, and say what a run can be evaluated on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from procap.errors import UsageError, unknown_name, validate
from procap.recipe import Recipe, format_value
from runner.config import RunConfig, Target
from shards.default_paths import data_root
from shards.image_selection import CLASS_CHOICES, parse_classes
from shards.uneven_samples import BALANCED, check_sampling

if TYPE_CHECKING:
    from procap.methods.method import Method


@dataclass(frozen=True)
class RunChoices:
    """What is chosen of a run before it is resolved.

    classes: by default "base", or "all" of a data set of test images alone, which has no halves.
    recipe: "published" is the method's published recipe for `task`, "procap" is ProCAP's; `overrides` change fields.
    task: selects the published recipe and options; None: "few-shot" on all classes, else "base-to-novel".
    options: fields of the method; the others get the values published for `task` (recipe "published"), else defaults.
    """

    method: str
    dataset: str
    classes: str = ""
    shots: int = 16
    sampling: str = BALANCED
    seed: int = 1
    backbone: str = "mini"
    pretrained: str | None = None
    precision: str = "fp32"
    recipe: str = "published"
    task: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


def plan_run(*, data: Path | None = None, **choices: Any) -> RunConfig:
    """Resolve names, defaults and recipes into a `RunConfig`, and replace what it does not read. Raises UsageError.

    choices: fields of `RunChoices`; `check_read` refuses overrides without effect. data: folder of packed sets that are
    not in the catalogue; None: `$PROCAP_DATA`, else the cache.
    """
    from procap.methods import method_class, method_options
    from shards.resolve import resolve_dataset

    chosen = RunChoices(**choices)
    method, shots = chosen.method, chosen.shots
    if chosen.recipe not in ("published", "procap"):
        raise unknown_name("recipe", chosen.recipe, ("published", "procap"))
    dataset = resolve_dataset(chosen.dataset, data or data_root())
    classes = parse_classes(chosen.classes or ("all" if dataset.test_only else "base"))
    fields = {"dataset": dataset.name, "classes": classes, "shots": shots, "seed": chosen.seed}
    fields |= {"method": method, "precision": chosen.precision, "sampling": check_sampling(chosen.sampling)}
    overrides = dict(chosen.overrides)
    # Only checks `overrides`, with placeholders for the rest, before the import of the method, which takes seconds.
    checked = validate(Recipe, {"lr": 1.0, "epochs": 0, "batch_size": 1, **overrides}, "recipe")
    validate(RunConfig, {"recipe": checked, **fields}, "run")
    cls = method_class(method)
    from procap.methods.method import TASKS

    task = chosen.task or ("few-shot" if classes == "all" else "base-to-novel")
    if task not in TASKS:
        raise unknown_name("task", task, TASKS)
    published, published_options = cls.recipe(task, shots, dataset.name), cls.task_options(task, shots, dataset.name)
    named_recipe = published
    if chosen.recipe == "procap":
        named_recipe, published_options = method_class("procap").recipe(task, shots, dataset.name), {}
    # A method that is not trained stays so in the recipe of a different one.
    if published.epochs == 0:
        overrides["epochs"] = 0
    if "epochs" in overrides:
        # Without `iterations` epochs are passes over the images, as a user who gives their number expects.
        overrides = {"iterations": None, **overrides}
    recipe = validate(Recipe, {**named_recipe.model_dump(), **overrides}, "recipe")
    if published.epochs and not recipe.epochs:
        raise UsageError(f"epochs = 0 trains nothing, which {method} needs: give 1 or more, or `--methods zeroshot`")
    options = method_options(method, {**published_options, **chosen.options})
    unread_by_method = cls.unread_fields(options) | (set() if recipe.epochs else {*recipe.unread()})
    # The method's first: under a field that it does not read, others may be read all the same.
    recipe = recipe.model_copy(update={name: getattr(named_recipe, name) for name in unread_by_method})
    recipe = recipe.model_copy(update={name: getattr(named_recipe, name) for name in recipe.unread()})
    recipe_name = "custom" if recipe != named_recipe and published.epochs > 0 else chosen.recipe
    # Equal trainings are one run: under any recipe a method has its own values of what it does not read, also in place
    # of `overrides` of them, which `check_read` then refuses.
    recipe = recipe.model_copy(update={name: getattr(published, name) for name in unread_by_method})
    fields |= {"options": options.model_dump(mode="json"), "recipe": recipe, "recipe_name": recipe_name}
    return validate(RunConfig, fields | _resolve_backbone(cls, method, chosen.backbone, chosen.pretrained), "run")


def check_read(configs: Sequence[RunConfig], overrides: Mapping[str, Any]) -> None:
    """Raise UsageError for a changed recipe field that none of the trainings reads."""
    for name, value in overrides.items():
        changed = getattr(validate(Recipe, {"lr": 1.0, "epochs": 0, "batch_size": 1, name: value}, "recipe"), name)
        unread = [config for config in configs if getattr(config.recipe, name) != changed and name in _unread(config)]
        if unread and len(unread) == len(configs):
            conditions = dict.fromkeys(filter(None, (_unread(config)[name] for config in unread)))
            hint = f"give {' or '.join(conditions)} as well, or leave it out" if conditions else "leave it out"
            methods = ", ".join(dict.fromkeys(config.method for config in unread))
            raise UsageError(f"{name} = {format_value(value)} is not read by {methods} in this recipe: {hint}")


def _unread(config: RunConfig) -> dict[str, str]:
    """Name the recipe fields that a training does not read; empty or the condition under which it would."""
    from procap.methods import method_class, method_options

    options = method_options(config.method, config.options)
    return config.recipe.unread() | dict.fromkeys(method_class(config.method).unread_fields(options), "")


def _resolve_backbone(cls: type[Method], method: str, backbone: str, pretrained: str | None) -> dict[str, Any]:
    """Resolve the names of a backbone and its weights, with their digest if they are a file; checks the towers."""
    from procap.weights.architectures import canonical_name, check_towers, model_configs, names_file, plain_towers

    backbone, pretrained = canonical_name(backbone, pretrained)
    fields = {"backbone": backbone, "pretrained": pretrained}
    if backbone in model_configs():
        check_towers(method, cls.changes, backbone, plain_towers(model_configs()[backbone]))
    if names_file(backbone) or (pretrained and names_file(pretrained)):
        # This imports torch.
        from procap.weights.loading import weights_digest

        fields["weights_digest"] = weights_digest(backbone, pretrained)
    return fields


def control_options(method: str, recipe_name: str) -> dict[str, Any]:
    """Return the options of a method where the recipe is chosen by name: in ProCAP's, MaPLe has as many tokens."""
    return {"n_ctx": 4} if (method, recipe_name) == ("maple", "procap") else {}


def can_classify(config: RunConfig, target: Target, data: Path | None = None) -> bool:
    """Whether the method of a run has a rule for all classes of `target`.

    A method without one for new classes answers for those trained on, also in test sets of another kind of image.
    """
    from procap.methods import method_class
    from shards.resolve import resolve_dataset

    if method_class(config.method).knows_new_classes:
        return True
    if target.dataset != config.dataset:
        return resolve_dataset(target.dataset, data).test_only
    within = {"base": ("dev-base", "dev-novel"), "all": CLASS_CHOICES}.get(config.classes, ())
    return target.classes in (config.classes, *within)


def known_target(config: RunConfig) -> Target:
    """Return the images of a run's classes: those of test, or val where a run helps to choose a method."""
    return Target(config.dataset, config.classes, "val" if config.classes.startswith("dev-") else "test")
