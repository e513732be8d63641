"""The base class of all methods: what training and inference call.

A method supplies learnable parameters, the text of its class prompts and, once per step, the token operations (`plans`)
for both frozen towers. Loss and classifier follow from these; a method with another loss or classifier overrides them.

Shapes: B images, C classes, E joint embedding.
"""

from __future__ import annotations

import abc
import copy
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from pydantic import BaseModel
from torch import Tensor, nn

from procap.classifier import AveragedClassifier, Classifier, cosine_logits, unit
from procap.clip import CLIP
from procap.methods.data_use import DataUse
from procap.methods.hooks import TrainingHooks
from procap.methods.options import MethodOptions, TemplateOptions
from procap.methods.prompts import ClassPrompts, template_prompts
from procap.parallel import ClassShares, Communicator, gather_batch
from procap.plan import NO_CHANGE, Plan
from procap.prompt_packing import PromptSet
from procap.recipe import Recipe
from procap.text import LabelSpace

TASKS = ("base-to-novel", "cross-dataset", "domain-generalization", "few-shot")
"""The tasks that published recipes distinguish."""

TRANSFER_TASKS = ("cross-dataset", "domain-generalization")
"""Tasks that train on ImageNet and test on other data sets."""

PublishedOptions = Mapping[str, Mapping[str, object]]
"""Options by task ("transfer" for both of `TRANSFER_TASKS`), by data set, and of "other" data sets."""

Noise = tuple[Tensor, ...]
"""All random tensors of one training step, drawn before it; () for a deterministic method."""


@dataclass(frozen=True)
class PublicLayout:
    """How the public code of a method names the tensors of its model and saves it.

    folder: the model's name, and that of the folder of its files.
    names: names of parameters, or their first parts, and what replaces them; {} is the rest of the name, {1} and {2}
        its first parts. The longest one that fits counts, and slashes in the rest become dots.
    module: the part of the model that is saved; empty if all of it is, with the frozen towers.
    unused: beginnings of the names of tensors that are saved as well but not used in inference.
    dassl: it is one of Dassl's trainers; otherwise it has no file format, and safetensors are exchanged.
    """

    folder: str
    names: Mapping[str, str]
    module: str = ""
    unused: tuple[str, ...] = ()
    dassl: bool = True


class MethodFacts(abc.ABC):
    """What a method says of itself, as class attributes: how it is shown, its published recipe and its public code.

    The first line of its docstring is what `procap ls methods` says.

    title, colour: in tables and plots, the colour as "#0072b2"; the defaults are the method's name and a spare colour.
    groups: names that stand for several built-in methods, this one among them.
    selection: what it is chosen by: "last step", "validation" for at most four validation images of each class, or "-".
    uses: what it looks at: images, class names, further models and texts.
    published: options of its published recipes that differ from the defaults.
    public_layout: how its public code saves it; None if that is not supported.
    mini_lr: of a built-in method, the learning rate in ProCAP's recipe under the profile mini of `procap bench`; chosen
        by base validation images; docs/methods.md has the command. mini_options: its options there.
    first_stage: a method with a subset of its options, whose trained tensors are among its initial ones.
    changes: the towers ("image", "text") that its plans change, or whose weights it reads.
    knows_new_classes: it can classify images of classes that it was not trained on.
    needs_every_class: a training needs an image of each class, which `--sampling natural-any` may not give.
    """

    title: ClassVar[str] = ""
    colour: ClassVar[str] = ""
    groups: ClassVar[tuple[str, ...]] = ("prompts",)
    selection: ClassVar[str] = "last step"
    uses: ClassVar[DataUse] = DataUse()
    published: ClassVar[PublishedOptions] = {}
    public_layout: ClassVar[PublicLayout | None] = None
    mini_lr: ClassVar[float | None] = None
    mini_options: ClassVar[Mapping[str, object]] = {}
    first_stage: ClassVar[str] = ""
    changes: ClassVar[tuple[str, ...]] = ("image", "text")
    knows_new_classes: ClassVar[bool] = True
    needs_every_class: ClassVar[bool] = False

    @classmethod
    @abc.abstractmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return the method's own published recipe for one of `TASKS`; shots 0 stands for all images."""

    @classmethod
    def first_recipe(cls, recipe: Recipe, options: BaseModel, dataset: str) -> Recipe:
        """Return the recipe of `first_stage` before a training in `recipe`: by default the same."""
        return recipe

    @classmethod
    def task_options(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> dict[str, object]:
        """Return the options that are published for `task`, else for `dataset`, else for other data sets."""
        name = "transfer" if task in TRANSFER_TASKS else task
        keys = [key for key in (name, dataset, "other") if key in cls.published]
        return dict(cls.published[keys[0]]) if keys else {}


class Method(MethodFacts, TrainingHooks):
    """A method over a frozen CLIP; `parameters()` and `state_dict()` hold what it learns and nothing else.

    An author knows the members of this class. `MethodFacts` has what describes the method, `TrainingHooks` what takes
    part in a training beyond its steps; the protocols of `procap.methods.hooks` are for methods that define them.

    group: the ranks that share every training step; None for a single process.
    prompts: the tokenized prompts of the classes trained on, laid out once for all steps.
    views: random views of each training image; with several, training images are [B, views, 3, H, W].
    image_adapter, text_adapter: modules [N, E] to [N, E] behind the towers, on features that are not normalised, in
        training and inference; the identity unless a method replaces them.
    """

    Options: ClassVar[type[MethodOptions]] = MethodOptions
    views: ClassVar[int] = 1
    options: BaseModel

    def __init__(self, clip: CLIP, space: LabelSpace, options: BaseModel, generator: torch.Generator) -> None:
        """Initialise the parameters from `generator` (on the CPU) alone.

        Raises UsageError for options that do not fit the towers, UserError naming a class whose prompt is too long.
        """
        super().__init__()
        # A tuple hides the towers from the module registry: they are shared, frozen, and not part of the state dict.
        self._held = (clip,)
        self.space = space
        self.options = options
        self.group: Communicator | None = None
        self.image_adapter: nn.Module = nn.Identity()
        self.text_adapter: nn.Module = nn.Identity()
        # Not buffers: these follow from the frozen CLIP and the names of the classes, which a checkpoint has.
        self.prompts = self.class_prompts(space)
        self._constants: dict[str, Tensor] = {}

    @property
    def clip(self) -> CLIP:
        return self._held[0]

    def with_clip(self, clip: CLIP) -> Self:
        """Return the same method, sharing its parameters, over `clip`, such as the model without optimizations."""
        twin = copy.copy(self)
        twin._held, twin._constants = (clip,), {}
        return twin

    def prompts_of(self, space: LabelSpace | None) -> ClassPrompts:
        """Return the tokenized prompts of `space` (default: the classes trained on)."""
        return self.prompts if space is None or space == self.space else self.class_prompts(space)

    def constant(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """Return a tensor that training needs and that never changes; it is computed at the first use."""
        if name not in self._constants:
            # The first use can be in inference mode, whose tensors no backward pass may keep.
            with torch.inference_mode(False):
                self._constants[name] = compute()
        return self._constants[name]

    def class_prompts(self, space: LabelSpace) -> ClassPrompts:
        """Tokenize the prompts of `space` at the full context length; reads `clip`, `options` and `space` only.

        By default a prompt is that of `TemplateOptions`, or the data set's template for a method with other options.
        """
        template = self.options.template if isinstance(self.options, TemplateOptions) else None
        return template_prompts(self.clip, space, template)

    def known(self, space: LabelSpace) -> Tensor:
        """Find each class of `space` among those trained on, by name: positions [C], -1 for a new class.

        Classes that share a name, as on ImageNet, are found in their order if `space` has all of them. Otherwise the
        name does not tell which of them is meant: it counts as new, with a warning.
        """
        names, device = self.space.classnames, self.clip.device
        if space.classnames == names:
            # Training steps need it, and a copy to a GPU would hold up the host in each of them.
            return self.constant("positions", lambda: torch.arange(len(names), device=device))
        trained, here, positions = Counter(names), Counter(space.classnames), defaultdict[str, list[int]](list)
        for i, name in enumerate(names):
            positions[name].append(i)
        for name in (name for name in here if trained[name] and trained[name] != here[name]):
            counts = f"{trained[name]} of the classes trained on and {here[name]} of those here"
            warnings.warn(f"'{name}' is the name of {counts}: it counts as the name of a new class", stacklevel=3)
        known = [positions[name].pop(0) if trained[name] == here[name] else -1 for name in space.classnames]
        return torch.tensor(known, device=device)

    def draw(self, generator: torch.Generator) -> Noise:
        """Draw the noise of one step on the CPU, so that a seed gives the same noise on every device.

        `loss` gets it on the method's device. The draw is separate from the step, so that the step does the same work
        every time and can be captured once as a CUDA graph and replayed.
        """
        return ()

    @abc.abstractmethod
    def plans(self, prompts: ClassPrompts, noise: Noise | None = None) -> tuple[Plan, Plan]:
        """Build image plan and text plan from the current weights; `noise` is None in inference."""

    def scale(self) -> Tensor:
        """Return the factor of the cosines: CLIP's own frozen temperature, inverted."""
        return self.clip.logit_scale.exp()

    def features(self, images: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        """Compute image features [B, E] of the global batch and class features [C, E] of a step, not normalised.

        For `loss` alone: `classifier` computes them from `plans` and the adapters as well, and does not call this.
        """
        prompts = self.prompts
        image_plan, text_plan = self.plans(prompts, noise)
        image = self._encode_batch(images, image_plan)
        text = self._encode_classes(prompts.tokenized, text_plan)
        # The adapters come behind the gather: all ranks compute the same gradient of them, which their average keeps.
        return self.image_adapter(image), self.text_adapter(text)

    def _encode_batch(self, images: Tensor, plan: Plan) -> Tensor:
        """Compute the features [B, E] of the global batch, not normalised, from those of this rank's images."""
        return gather_batch(self.group, self.clip.encode_image(images, plan))

    @torch.no_grad()
    def _frozen_features(self, images: Tensor) -> Tensor:
        """Compute the frozen CLIP's features [B, E] of the global batch, normalised, float32, without gradient."""
        # Unlike texts, images are encoded in every step, so autocast stays as the caller has set it.
        return unit(self._encode_batch(images, NO_CHANGE))

    def _encode_classes(self, prompts: PromptSet, plan: Plan) -> Tensor:
        if not plan:
            # Nothing changes the text tower, as in VPT.
            return self.constant("classes", lambda: self.clip.encode_text(prompts, plan))
        if self.group is None or not ClassShares.are_worthwhile(len(prompts), self.group):
            return self.clip.encode_text(prompts, plan)
        shares = ClassShares(len(prompts), self.group)
        features = self.clip.encode_text(*shares.select(prompts, plan))
        # Classes come first in what is gathered, also under token sets [S, C, E].
        return self.group.gather_uneven(features.transpose(0, -2), shares.counts).transpose(0, -2)

    def loss(self, images: Tensor, labels: Tensor, noise: Noise) -> dict[str, Tensor]:
        """Compute the weighted loss terms, the main one first, whose sum is minimised; `noise` is what `draw` returned.

        images [B, 3, H, W], labels [B] int64. Each rank of a group gets its images of the global batch, the labels
        of all of it, and the same noise; all ranks return the same terms.
        """
        image, text = self.features(images, noise)
        return {"ce": F.cross_entropy(cosine_logits(image, text, self.scale()), labels)}

    def classifier(self, space: LabelSpace | None = None) -> Classifier:
        """Make a snapshot for inference on the classes of `space` (default: those trained on); needs no retraining.

        Raises UserError naming a class whose prompt is too long.
        """
        return self._classifier(space, None)

    def sampled_classifier(self, noises: Sequence[Noise], space: LabelSpace | None = None) -> Classifier:
        """Make a snapshot whose probabilities are means over samples of Gaussian tokens, one for each of `noises`.

        noises: what `draw` returned, on the method's device.
        """
        return AveragedClassifier([self._classifier(space, noise) for noise in noises], probabilities=True)

    @torch.no_grad()
    def _classifier(self, space: LabelSpace | None, noise: Noise | None) -> Classifier:
        prompts = self.prompts_of(space)
        image_plan, text_plan = self.plans(prompts, noise)
        text = self.text_adapter(self.clip.encode_text(prompts.tokenized, text_plan))
        return self.make_classifier(image_plan, text, space or self.space)

    def make_classifier(self, image_plan: Plan, text: Tensor, space: LabelSpace) -> Classifier:
        """Make a classifier from the image plan and the class features [C, E] of `space`, under `torch.no_grad`."""
        return Classifier(self.clip, image_plan, text, self.scale(), self.image_adapter)


def name_options(names: Sequence[str], table: Mapping[str, Sequence[object]]) -> PublishedOptions:
    """Name the values of each row of a table of published options."""
    return {key: dict(zip(names, row, strict=True)) for key, row in table.items()}
