"""Define what the files of a run contain: schemas, strict reading, atomic writes. `run_folders` has their paths."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, Field, PlainSerializer, ValidationError, model_validator

from procap.errors import UsageError, UserError, describe_invalid
from procap.methods import describe_change
from procap.methods.options import Pool
from procap.methods.plugins import MethodSource, describe_unexpected
from procap.text import LabelSpace
from runner.calibration import Calibration, Probabilities
from runner.config import Amount, Bytes, Count, EvalSettings, FrozenModel, RunConfig, Target, TargetName, Throughput
from shards.credentials import mask
from shards.files import explain_writing, read_regular, write_file
from shards.manifest import lines_digest
from shards.uneven_samples import BALANCED, Sampling

Document = TypeVar("Document", bound=BaseModel)
WRITTEN = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$"
"""A time in UTC, ISO 8601 in seconds."""
# Masked when it is written too, because `model_copy` does not validate its changes.
MaskedText = Annotated[str, AfterValidator(mask), PlainSerializer(mask)]
"""Text of an error, without credentials."""
EXPECTED = (UserError, OSError)
"""Errors of the user or the environment, which are no fault of the program."""

NUMBERS = re.compile(r"\[\n[-+\d.eE,\s]*\]")
"""A list of numbers in indented JSON, in which no string has a line break."""


RunStatus = Literal["running", "paused", "interrupted", "failed"]
"""Status of an unfinished run; "paused" after the epochs that the caller of `train` asked for."""


def describe_failure(error: Exception) -> str:
    """Describe in one line, without credentials, why a run or another part of a command failed."""
    return mask(" ".join((str(error) if isinstance(error, EXPECTED) else describe_unexpected(error)).split()))


class EpochLog(FrozenModel):
    """One epoch; `terms` are means over its steps, weighted as in the loss."""

    epoch: int = Field(ge=0, description="0-based")
    lr: float = Field(ge=0)
    terms: dict[str, float] = Field(min_length=1)
    seconds: Amount = Field(description="in steps: saving of states excluded")
    images_per_second: Throughput | None
    skipped: Count = Field(default=0, description="steps without an update, because gradients overflowed at fp16")
    gradient_norms: dict[str, float] = Field(
        default_factory=dict, description="of the weighted loss terms after the epoch, see `DiagnosedMethod`"
    )


class FewShotRecord(FrozenModel):
    shots: Count
    sampling: Sampling = BALANCED
    seed: Count
    digest: str = Field(description="of the paths of the chosen training images, in order")
    samples: list[str] = Field(description="paths of the chosen training images")

    @model_validator(mode="after")
    def _is_of_samples(self) -> FewShotRecord:
        if lines_digest(self.samples) != self.digest:
            raise ValueError(f"samples are not those of digest {self.digest}")
        return self


class UnlabelledRecord(FrozenModel):
    """The images that a run trained on without labels."""

    pool: Pool
    images: Count
    digest: str = Field(description="of the paths of the images, in order")


class ImportedFile(FrozenModel):
    """The checkpoint of a public trainer that a run was imported from."""

    name: str
    sha256: str
    epoch: Count | None = Field(description="epochs that were trained; None if the file does not say")


class StoredDocument(FrozenModel):
    """A document that is a whole JSON file, with the version of its format."""

    # Called `schema` in files: models of pydantic have a method of that name.
    schema_version: Literal[1] = Field(default=1, validation_alias="schema", serialization_alias="schema")


class RunDocument(StoredDocument):
    """A document in the folder of the run with this hash."""

    config_hash: str


class TrainResult(RunDocument):
    """`train.json`, written last: if it exists, the training is finished."""

    status: Literal["finished"] = "finished"
    steps: Count = 0
    images: Count = 0
    epochs: list[EpochLog] = Field(default_factory=list)
    seconds: Amount = Field(
        default=0.0, description="of training, saving included; loading, tracking and lost work excluded"
    )
    images_per_second: Throughput | None = Field(default=None, description="of steps, without the first `warmup_steps`")
    images_per_second_model: Throughput | None = Field(default=None, description="the same, without waiting for images")
    warmup_steps: Count = Field(default=0, description="not in `images_per_second`; no warm-up of the learning rate")
    phases: dict[str, Amount] = Field(default_factory=dict, description="seconds by phase")
    peak_memory_bytes: Bytes | None = Field(default=None, description="allocated by tensors on a GPU")
    stored_seconds: Amount = Field(default=0.0, description="of `seconds`: measured when the features were stored")
    trainable_parameters: Count
    statistics: dict[str, dict[str, float]] = Field(
        default_factory=dict, description="numbers about the learned parameters, see `DiagnosedMethod`"
    )
    kernels: str = Field(default="", description="implementation chosen by device, see `DiagnosedMethod`")
    fewshot: FewShotRecord | None = Field(default=None, description="None when none was trained on")
    unlabelled: UnlabelledRecord | None = Field(default=None, description="instead of labelled images")
    manifest_digest: str = Field(description="of the packed training set")
    checkpoint_sha256: str
    backbone_digest: str
    written: str = Field(pattern=WRITTEN, description="when, in UTC")
    program: str = Field(description="version of this program, and its commit if known")
    environment: dict[str, Any]
    resumed: Count = Field(default=0, description="how often the run went on from a saved state")
    processes: Count = Field(default=1, description="that trained together")
    imported: ImportedFile | None = Field(default=None, description="instead of a training here")
    files: dict[str, str] = Field(default_factory=dict, description="SHA-256 of files that were read, by option")
    method_source: MethodSource | None = Field(
        default=None, description="code of the method; None for imported weights"
    )

    def changed_code(self, config: RunConfig) -> str:
        """Describe in one sentence why the installed code of the method is not what trained the run, or ""."""
        change = describe_change(config.method, self.method_source)
        hint = f"restore that code, or repeat the command of the training with `--methods {config.method} --force`"
        return change and f"{config.path} was trained {change}: {hint}"


class Progress(RunDocument):
    """`progress.json`, the state of a run that has not finished."""

    status: RunStatus = "running"
    step: Count
    steps: Count
    epochs: list[EpochLog]
    seconds: Amount
    resumed: Count = 0
    environment: dict[str, Any]
    reason: MaskedText = Field(default="", description="of the failure, in one line")


class ValidationCount(FrozenModel):
    """The correct images of a val or train target with the weights at the end of an epoch."""

    epoch: int = Field(ge=0, description="0-based")
    target: TargetName
    correct: Count
    total: Count = Field(gt=0)

    @property
    def accuracy(self) -> float:
        """Per-image accuracy in percent."""
        return 100.0 * self.correct / self.total


class ValidationHistory(RunDocument):
    """`validation.json`: the counts of a run's validation, one per epoch and target."""

    counts: list[ValidationCount]


class PerClass(FrozenModel):
    """Counts of the classes of a target, in its order."""

    correct: list[Count]
    total: list[Count]
    names: list[str] | None = None


def harmonic_mean(base: float, novel: float) -> float:
    """Compute 2bn / (b + n); 0 if both are 0."""
    return 2 * base * novel / (base + novel) if base + novel else 0.0


class TargetResult(RunDocument):
    """What a run computed of the images of a target, in a file of `FOLDER` that its target and settings name."""

    FOLDER: ClassVar[str]

    target: TargetName
    total: Count = Field(gt=0)
    limit: Count | None = Field(gt=0, description="number of images, the first of the list; None: all")
    dataset_size: Count = Field(description="images of the target without a limit")
    precision: str
    settings: EvalSettings = Field(default=EvalSettings(), description="what differs from the default")
    manifest_digest: str
    backbone_digest: str
    checkpoint_sha256: str
    written: str = Field(pattern=WRITTEN, description="when, in UTC")
    program: str = Field(description="version of this program, and its commit if known")
    environment: dict[str, Any]

    @property
    def file(self) -> str:
        """The name of the file that holds the result; empty if the target is none."""
        with suppress(UsageError):
            return Target.parse_unchecked(self.target).file(self.settings)
        return ""

    def is_current(self, training: TrainResult, limit: int | None) -> bool:
        """Whether the result belongs to the weights of `training`, and counts all images or the first `limit`."""
        weights, counts = (self.checkpoint_sha256, self.backbone_digest), not self.limited or self.limit == limit
        return counts and weights == (training.checkpoint_sha256, training.backbone_digest)

    @property
    def limited(self) -> bool:
        """Whether images of the target were left out because of a limit."""
        return self.total < self.dataset_size

    @model_validator(mode="after")
    def _has_all_images(self) -> TargetResult:
        for name in ("labels", "predicted", "confidence", "base_confidence", "scores"):
            if (values := getattr(self, name, None)) is not None and len(values) != self.total:
                raise ValueError(f"{name} has {len(values)} images, total is {self.total}")
        return self


MCM = "MCM"
"""Maximum concept matching, the rule of scores: the highest probability of a class."""


class ScoreResult(TargetResult):
    """How well each image of a target fits the classes trained on; the score of a run is that of `run_state.score`."""

    FOLDER = "scores"

    score: str = Field(default=MCM, description="the rule of the scores: MCM, or one of the method's own")
    scores: list[Amount] = Field(repr=False, description="of the images, in order, with six significant digits")


class EvalResult(TargetResult):
    """Integer counts on one target, from which every table is computed."""

    FOLDER = "eval"

    correct: Count
    per_class: PerClass
    calibration: Calibration | None = None
    num_classes: Count
    temperature: Annotated[float, Field(gt=0)] | None = Field(default=None, description="what divided the logits")
    batch_size: Count = Field(gt=0, description="of the evaluation, on which its throughput depends")
    workers: Count = Field(description="threads that decoded images; 0: the one that evaluates")
    seconds: Amount = Field(description="class features, warm-up, and all images")
    images_per_second: Throughput | None = Field(description="decoding included")
    images_per_second_model: Throughput | None = Field(description="decoding excluded")
    phases: dict[str, Amount] = Field(default_factory=dict)
    stored_seconds: Amount = Field(default=0.0, description="of `seconds`: measured when the features were stored")
    peak_memory_bytes: Bytes | None = Field(default=None, description="allocated by tensors on a GPU")
    labels: list[Count] | None = Field(default=None, repr=False, description="true label of each image, in order")
    predicted: list[Count] | None = Field(default=None, repr=False, description="predicted label of each image")
    confidence: Probabilities | None = Field(default=None, repr=False, description="of the predicted label")
    base_confidence: Probabilities | None = Field(default=None, repr=False, description="of the likeliest base class")

    @model_validator(mode="after")
    def _images_add_up(self) -> EvalResult:
        """Refuse counts that contradict each other: every number of a table and a report comes from them."""
        correct, total, classes = self.per_class.correct, self.per_class.total, self.num_classes
        labels, predicted = self.labels, self.predicted
        if (sum(correct), sum(total)) != (self.correct, self.total):
            sums = f"{sum(correct)} of {sum(total)} in the sum of per_class"
            raise ValueError(f"{self.correct} of {self.total} images are correct, but {sums}")
        if not len(correct) == len(total) == len(self.per_class.names or total) == classes:
            raise ValueError(f"per_class has {len(total)} classes, num_classes is {classes}")
        for label, (right, images) in enumerate(zip(correct, total, strict=True)):
            if right > images:
                raise ValueError(f"{right} of {images} images of class {label} are correct")
        if self.total != min(self.limit or self.dataset_size, self.dataset_size):
            sizes = f"dataset_size = {self.dataset_size} with limit = {self.limit}"
            raise ValueError(f"total = {self.total} images, of {sizes}")
        if (self.settings.temperature is None) != (self.temperature is None):
            raise ValueError(f"temperature = {self.temperature}, in settings it is {self.settings.temperature}")
        if self.calibration:
            bins = self.calibration.equal_width
            if (sum(bins.correct), sum(bins.count)) != (self.correct, self.total):
                raise ValueError(f"calibration has {sum(bins.correct)} of {sum(bins.count)} correct images")
        if (labels is None) != (predicted is None):
            raise ValueError("labels and predicted belong together")
        if labels is not None and predicted is not None:
            if (last := max(max(labels), max(predicted))) >= classes:
                raise ValueError(f"labels and predicted name class {last} of {classes}")
            true, is_right = np.array(labels), np.equal(labels, predicted)
            if [np.bincount(each, minlength=classes).tolist() for each in (true[is_right], true)] != [correct, total]:
                raise ValueError("labels and predicted contradict per_class")
        if self.base_confidence and (not self.confidence or np.greater(self.base_confidence, self.confidence).any()):
            raise ValueError("base_confidence is higher than confidence")
        return self

    def correct_images(self) -> NDArray[np.bool_] | None:
        """Return whether each image of the target was right [total]; None if not recorded."""
        return None if self.predicted is None else np.equal(np.array(self.labels), np.array(self.predicted))

    def wrong_images(self) -> NDArray[np.int64] | None:
        """Return true and predicted labels of the wrong images, in order [2, total - correct]; None if not recorded."""
        right = self.correct_images()
        return None if right is None else np.array([self.labels, self.predicted])[:, ~right]

    @property
    def accuracy(self) -> float:
        """Per-image accuracy in percent."""
        return 100.0 * self.correct / self.total

    @property
    def macro_accuracy(self) -> float:
        """Mean of the classes' accuracies in percent, over classes with test images."""
        counts = zip(self.per_class.correct, self.per_class.total, strict=True)
        return 100.0 * fmean(correct / total for correct, total in counts if total)


def write_bytes(path: Path, data: bytes) -> str:
    """Replace `path` by `data` or leave it unchanged; returns the SHA-256. Raises UserError if it cannot be written."""
    with explain_writing(path):
        write_file(path, data)
    return hashlib.sha256(data).hexdigest()


def write_json(path: Path, document: BaseModel | Mapping[str, Any]) -> str:
    """Write strict JSON (no NaN) in a stable layout, a list of numbers in one line, with `write_bytes`."""
    plain = document.model_dump(mode="json", by_alias=True) if isinstance(document, BaseModel) else dict(document)
    text = json.dumps(plain, indent=1, ensure_ascii=False, allow_nan=False)
    text = NUMBERS.sub(lambda numbers: "".join(numbers[0].split()), text)
    return write_bytes(path, (text + "\n").encode())


def read_document(path: Path, model: type[Document], repair: str = "") -> Document | None:
    """Read the document at `path`; None if there is none.

    Raises UserError, which ends in `repair`, if it is broken. Types are strict: `true` is not accepted as a number.
    """
    try:
        return model.model_validate_json(read_regular(path), strict=True)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except ValidationError as error:
        command = "eval" if path.parent.name in ("eval", "scores") else "train"
        repair = repair or f"move it away, or repeat that run with procap {command} --force"
        raise UserError(f"{path} cannot be read ({describe_invalid(error)}); {repair}") from error


class CheckpointCard(FrozenModel):
    """Metadata of a checkpoint: enough to evaluate it without the data it was trained on."""

    checkpoint_schema: Literal[1] = 1
    config: RunConfig
    classnames: tuple[str, ...]
    template: str
    templates: tuple[str, ...]
    backbone_digest: str
    manifest_digest: str

    @model_validator(mode="after")
    def _makes_prompts(self) -> CheckpointCard:
        """Refuse templates and class names of which no prompts can be made."""
        _ = self.space
        return self

    @property
    def space(self) -> LabelSpace:
        """The classes the prompts were trained on."""
        return LabelSpace(self.classnames, self.template, self.templates, self.config.dataset)
