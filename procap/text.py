"""The class names and templates of a data set, and the prompts made of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LabelSpace:
    """The classes, in label order, and the templates of their data set.

    classnames: raw names; underscores are read as spaces in prompts.
    template: the hand-written template of the CoOp family, with its full stop and one `{}`.
    templates: the templates that initialise ProCAP's tokens, without full stop, one `{}` each.
    dataset: the data set's name, because some published rules depend on it (zero-shot has other templates on ImageNet).
    """

    classnames: tuple[str, ...]
    template: str = "a photo of a {}."
    templates: tuple[str, ...] = ("a photo of a {}",)
    dataset: str = ""

    def __post_init__(self) -> None:
        for template in (self.template, *self.templates):
            parts = template.split("{}")
            if len(parts) != 2 or {*"".join(parts)} & {*"{}"}:
                raise ValueError(f"template {template!r} needs exactly one {{}} for the class name, and no other brace")
        if not self.classnames:
            raise ValueError("a label space needs at least one class name")

    def names(self) -> tuple[str, ...]:
        """Return the class names as prompts use them."""
        return tuple(name.replace("_", " ") for name in self.classnames)

    def prompts(self, template: str | None = None) -> list[str]:
        """Fill one template per class (the data set's own unless another is given)."""
        return [(template or self.template).format(name) for name in self.names()]
