"""IPO: of the prompt templates that a language model proposes, the one with the highest few-shot accuracy.

Source: Du et al. 2024, "IPO: Interpretable Prompt Optimization for Vision-Language Models", and the settings of its
public code (one image of each class). The words of the request are ours, and have no descriptions of images.

Shapes: C classes, E joint embedding.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self
from urllib.parse import urlsplit

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from procap.classifier import cosine_logits
from procap.clip import CLIP
from procap.errors import UsageError, UserError
from procap.methods.data_use import DataUse
from procap.methods.features import FeatureBank, FeatureMethod, Head, accuracy
from procap.methods.options import TEMPLATES, MethodOptions
from procap.methods.zeroshot import ENSEMBLE
from procap.teacher import text_bank
from procap.text import LabelSpace

CLASS = "<CLASS>"
"""Stands for the class name in requests and answers, and in files if one likes; {} does in templates."""
KEY = "OPENAI_API_KEY"
"""The environment variable with the key of the endpoint, which is written nowhere."""
LOG = "proposals.json"

Scores = dict[str, tuple[float, float]]
"""Accuracy in percent and negative cross-entropy on the training images, by template: the larger, the better."""


class IPOOptions(MethodOptions):
    proposals: str = Field(
        "",
        description="file with a template a line, or a run's proposals.json; {dataset} in its path is the data set; or "
        "templates (a file: ./templates): hand-written ones; training needs one of them, or an endpoint",
    )
    endpoint: str = Field("", description=f"URL of an OpenAI-compatible API that proposes them; its key is ${KEY}")
    model: str = Field("", description="language model of the endpoint")
    start: str = Field("a photo of a {}.", description="the first template")
    rounds: int = Field(100, ge=1, description="rounds of requests to the endpoint")
    candidates: int = Field(8, ge=1, description="requests of a round, each for one template")
    shown: int = Field(30, ge=1, description="best templates so far that a request shows")
    threshold: float = Field(20.0, ge=0, le=100, description="lowest accuracy of a template that is shown")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        url = urlsplit(self.endpoint)
        if self.endpoint and (url.scheme not in ("http", "https") or "@" in url.netloc or url.query):
            raise ValueError(f"endpoint is no plain URL such as https://HOST/v1; its key belongs into ${KEY}")
        if bool(self.endpoint) != bool(self.model) or (self.endpoint and self.proposals):
            raise ValueError("give proposals, or both endpoint and model")
        if not read_template(self.start):
            raise ValueError("start needs exactly one {} for the class name, and no other brace")
        return self


def read_template(text: str) -> str:
    """Return the text as a template with one {} for the class name; "" for a text that is none."""
    template = " ".join(text.strip("\"' \t").replace(CLASS, "{}").split())
    return template if template.count("{}") == 1 and not {*template.replace("{}", "")} & {*"{}"} else ""


class IPO(FeatureMethod):
    """IPO (Du et al. 2024): the best of the prompt templates that a language model proposes."""

    Options = IPOOptions
    title = "IPO"
    groups = ("prompts",)
    selection = "-"
    uses = DataUse(models=("proposals",))
    takes_steps = False
    augments = False
    required_option = "proposals"
    file_option = "proposals"
    varying_rows = ("template_bytes",)
    # No language model has proposed templates for generated data.
    mini_options: ClassVar[Mapping[str, object]] = {"proposals": TEMPLATES}
    options: IPOOptions
    template_bytes: Tensor

    def __init__(self, clip: CLIP, space: LabelSpace, options: IPOOptions, generator: torch.Generator) -> None:
        super().__init__(clip, space, options, generator)
        self.scores: Scores = {}
        self.proposals: list[str] = []
        # A checkpoint holds tensors.
        start = torch.tensor([*read_template(options.start).encode()], dtype=torch.uint8)
        self.register_buffer("template_bytes", start)

    @classmethod
    def missing_option(cls, options: Mapping[str, Any]) -> str:
        return "" if options.get("endpoint") else super().missing_option(options)

    def prepare_training(self) -> None:
        """Read the proposals. Raises UserError for a file that cannot be read, or a line that is no template."""
        super().prepare_training()
        if self.options.endpoint:
            if self.group is not None and self.group.size > 1:
                raise UsageError("one process asks an endpoint: train in one, or give --option proposals=FILE")
            return
        file = self.option_file(self.options, self.space.dataset)
        self.proposals = read_proposals(file) if file else [*ENSEMBLE, self.space.template]

    @torch.no_grad()
    def fit(self, bank: FeatureBank) -> None:
        """Score the start and all proposals, and keep the best one; of equal ones the first."""
        self.add([read_template(self.options.start), *self.proposals], bank)
        for _ in range(self.options.rounds if self.options.endpoint else 0):
            request = make_request(self.space, self.scores, self.options)
            answers = [ask(self.options, request) for _ in range(self.options.candidates)]
            lines = (next((line for line in answer.splitlines() if CLASS in line), "") for answer in answers)
            self.add(filter(None, map(read_template, lines)), bank)
        if self.options.endpoint and len(self.scores) == 1:
            raise UserError(f"{self.options.model} at {self.options.endpoint} proposes no new template with {CLASS}")
        best = max(self.scores, key=self.scores.__getitem__)
        self.template_bytes = torch.tensor([*best.encode()], dtype=torch.uint8, device=self.template_bytes.device)

    def add(self, templates: Iterable[str], bank: FeatureBank) -> None:
        """Score the templates that are new."""
        for template in templates:
            if template not in self.scores:
                # One answer that is too long for CLIP must not end a search.
                with suppress(UserError) if self.options.endpoint else nullcontext():
                    logits = self.head_of(template, self.space)(bank.features[:, 0])
                    loss = F.cross_entropy(logits, bank.labels).item()
                    self.scores[template] = 100 * accuracy(logits, bank.labels), -loss

    def records(self) -> dict[str, dict[str, Any]]:
        """Return the log of the search: the scores of each template, in their order."""
        names = ("accuracy", "cross_entropy")
        return {
            LOG: {text: dict(zip(names, (right, -loss), strict=True)) for text, (right, loss) in self.scores.items()}
        }

    def head_of(self, template: str, space: LabelSpace) -> Head:
        return partial(cosine_logits, text=text_bank(self.clip, space, [template]), scale=self.scale())

    def head(self, space: LabelSpace) -> Head:
        """Make zero-shot CLIP with the best template."""
        return self.head_of(bytes(self.template_bytes.tolist()).decode(), space)


def read_proposals(file: Path) -> list[str]:
    """Read the templates of a file. Raises UserError for what is none, and for a file that cannot be read."""
    try:
        text = file.read_text(encoding="utf-8-sig")
        # The log of a run has the templates as keys.
        lines = [str(line) for line in (json.loads(text) if file.suffix == ".json" else text.splitlines())]
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"proposals = {file}: {error}; a text with one template a line is needed") from error
    if wrong := [line for line in lines if line.strip() and not read_template(line)]:
        raise UserError(f"proposals = {file}: '{wrong[0]}' needs exactly one {{}} or {CLASS} for the class name")
    return [*filter(None, map(read_template, lines))]


def make_request(space: LabelSpace, scores: Scores, options: IPOOptions) -> str:
    """Write the request for a template, with the best ones so far, the best of all last."""
    ranked = sorted((score, template) for template, score in scores.items() if score[0] >= options.threshold)
    shown = [
        f"{template.replace('{}', CLASS)}\naccuracy {right:.2f} %, loss {-loss:.4f}"
        for (right, loss), template in ranked[-options.shown :]
    ]
    return "\n\n".join([
        f"CLIP gives an image the class whose text is most like it. A template of such texts has {CLASS} where the "
        f"name of the class stands. The classes are: {', '.join(space.names())}.",
        "These templates were tried on training images. A higher accuracy is better, then a lower loss:", *shown,
        f"Write a template that differs from all of these and is better. It has {CLASS} exactly once and at most 30 "
        "words. Answer with the template alone, in one line.",
    ])  # fmt: skip


def ask(options: IPOOptions, request: str) -> str:
    """Send a request to the endpoint and return the answer. Raises UserError that names the endpoint."""
    from requests import Session
    from requests.adapters import HTTPAdapter, Retry

    headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get(KEY)) else {}
    messages, url = [{"role": "user", "content": request}], f"{options.endpoint.rstrip('/')}/chat/completions"
    body: dict[str, Any] = {"model": options.model, "messages": messages, "temperature": 1.0, "max_tokens": 40}
    # A limit of the rate, or a busy server, must not end a search.
    patience = Retry(connect=0, read=1, status=6, backoff_factor=1, status_forcelist=(429, 503), allowed_methods=None)
    try:
        with Session() as session:
            session.mount(options.endpoint, HTTPAdapter(max_retries=patience))
            # A redirect would take the key to another host.
            answer = session.post(url, json=body, headers=headers, timeout=60, allow_redirects=False)
            answer.raise_for_status()
            return str(answer.json()["choices"][0]["message"]["content"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{options.endpoint} gives no answer of {options.model}: {error}") from error
