"""The methods by name, and the groups that they are in.

Other packages add methods through the entry-point group "procap.methods": a name and a `Method` subclass.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from procap.errors import UsageError, unknown_name, validate
from procap.methods.data_use import DataUse
from procap.methods.plugins import MethodSource, code_digest, find_place, find_plugins, plugin_source
from procap.weights.architectures import check_towers

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel

    from procap.clip import CLIP
    from procap.methods.method import Method
    from procap.text import LabelSpace

METHODS: dict[str, str] = {
    "zeroshot": "procap.methods.zeroshot:ZeroShot",
    "probe": "procap.methods.probe:LinearProbe",
    "ncm": "procap.methods.probe:NearestMean",
    "tipadapter": "procap.methods.tipadapter:TipAdapter",
    "tipadapterf": "procap.methods.tipadapter:TipAdapterF",
    "clipadapter": "procap.methods.clipadapter:ClipAdapter",
    "taskres": "procap.methods.taskres:TaskRes",
    "lppp": "procap.methods.lppp:LPPP",
    "gda": "procap.methods.gda:GDA",
    "sstext": "procap.methods.sstext:SSText",
    "clap": "procap.methods.clap:CLAP",
    "crossmodal": "procap.methods.crossmodal:CrossModal",
    "prolip": "procap.methods.prolip:ProLIP",
    "coop": "procap.methods.coop:CoOp",
    "cocoop": "procap.methods.cocoop:CoCoOp",
    "kgcoop": "procap.methods.kgcoop:KgCoOp",
    "vpt": "procap.methods.vpt:VPT",
    "ivlp": "procap.methods.ivlp:IVLP",
    "maple": "procap.methods.maple:MaPLe",
    "promptsrc": "procap.methods.promptsrc:PromptSRC",
    "coprompt": "procap.methods.coprompt:CoPrompt",
    "tcp": "procap.methods.tcp:TCP",
    "prograd": "procap.methods.prograd:ProGrad",
    "bpl": "procap.methods.bpl:BPL",
    "dept": "procap.methods.dept:DePT",
    "dept-maple": "procap.methods.dept:DePTMaPLe",
    "kdpl": "procap.methods.kdpl:KDPL",
    "kdpl-maple": "procap.methods.kdpl:KDPLMaPLe",
    "dpc": "procap.methods.dpc:DPC",
    "aapl": "procap.methods.aapl:AAPL",
    "rebapl": "procap.methods.rebapl:ReBaPL",
    "mma": "procap.methods.mma:MMA",
    "mmrl": "procap.methods.mmrl:MMRL",
    "mmrlpp": "procap.methods.mmrlpp:MMRLPP",
    "skipt": "procap.methods.skipt:SkipT",
    "2sfs": "procap.methods.twosfs:TwoSFS",
    "cliplora": "procap.methods.cliplora:CLIPLoRA",
    "mocoop": "procap.methods.mocoop:MoCoOp",
    "mmlop": "procap.methods.mmlop:MMLoP",
    "ipo": "procap.methods.ipo:IPO",
    "gallop": "procap.methods.gallop:GalLoP",
    "plotpp": "procap.methods.plotpp:PLOTPP",
    "tda": "procap.methods.tda:TDA",
    "promptkd": "procap.methods.promptkd:PromptKD",
    "caspl-boost": "procap.methods.caspl:Boosting",
    "caspl": "procap.methods.caspl:CasPL",
    "caspl-maple": "procap.methods.caspl:CasPLMaPLe",
    "caspl-promptsrc": "procap.methods.caspl:CasPLPromptSRC",
    "tpt": "procap.methods.tpt:TPT",
    "tpt-coop": "procap.methods.tpt:TPTCoOp",
    "procap": "procap.methods.procap:ProCAP",
}
"""The built-in methods: module and class of each, imported on first use."""

COLOUR = re.compile("#[0-9a-fA-F]{6}")
"""Matches the colour of a method."""

FACTS = ("title", "selection", "groups", "uses")
"""The attributes of a built-in method's class that are read without importing it: literals, and a `DataUse` of some."""


def method_paths() -> dict[str, str]:
    """List name and `module:class` of every method, ours first; a plug-in never replaces one of our names."""
    return METHODS | {name: point.value for name, point in find_plugins().items() if name not in METHODS}


def method_class(name: str) -> type[Method]:
    """Import the class of a method; UsageError for an unknown name or a plug-in that cannot be used."""
    # Search plug-ins for other names only: listing the entry points of all packages takes longer than planning a run.
    paths = METHODS if name in METHODS else method_paths()
    if name not in paths:
        raise unknown_name("method", name, paths)
    # After the name is checked: this imports torch.
    from procap.methods.method import Method

    module, _, attribute = paths[name].partition(":")
    try:
        cls = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        # The import of a plug-in may raise anything.
        if name in METHODS:
            raise
        why = " ".join(f"{type(error).__name__}: {error} {find_place(error)}".split())
        raise UsageError(f"method '{name}' is a plug-in that cannot be loaded from {paths[name]}: {why}") from error
    if not (isinstance(cls, type) and issubclass(cls, Method)):
        raise UsageError(f"method '{name}': {paths[name]} is not a subclass of procap.methods.method.Method")
    if missing := sorted(cls.__abstractmethods__):
        raise UsageError(f"method '{name}' is a plug-in whose class {paths[name]} has no {'(), no '.join(missing)}()")
    return cls


def method_source(name: str) -> MethodSource | None:
    """Identify the installed code of a method; None for one that is not installed."""
    if name in METHODS:
        digest = code_digest(METHODS[name].partition(":")[0])
        return MethodSource(package="procap-bench", version="", digest=digest)
    return plugin_source(point) if (point := find_plugins().get(name)) else None


def loading_error(name: str) -> str:
    """Return why the class of a method cannot be used here, or ""."""
    try:
        method_class(name)
    except UsageError as error:
        return str(error)
    return ""


def describe_change(name: str, recorded: MethodSource | None) -> str:
    """Describe how the code of method `name` differs from what trained a run; empty if it does not or is unknown."""
    if recorded is None or (installed := method_source(name)) is None or installed == recorded:
        return ""
    why = loading_error(name)
    return f"by {recorded}, and {f'now {why}' if why else f'the code that is installed now is {installed}'}"


def title_and_colour(name: str) -> tuple[str, str]:
    """Return title and colour of a method as tables and plots show them.

    A plug-in whose title is missing, or that of a built-in method, has its name.
    """
    if name in METHODS:
        return _read_facts(METHODS[name]).title, ""
    if loading_error(name):
        return name, ""
    cls = method_class(name)
    is_taken = any(cls.title == title_and_colour(method)[0] for method in METHODS)
    return name if is_taken else cls.title or name, cls.colour if COLOUR.fullmatch(cls.colour) else ""


def method_groups() -> dict[str, list[str]]:
    """List the names for several built-in methods, and the methods of each."""
    groups = defaultdict[str, list[str]](list)
    for name, path in METHODS.items():
        for group in _read_facts(path).groups:
            groups[group].append(name)
    return dict(groups)


def data_use(name: str, options: Mapping[str, Any] | None = None) -> DataUse:
    """Return what a method with these options looks at; the default for one that is not installed."""
    if name not in METHODS and loading_error(name):
        return DataUse()
    facts, chosen = _read_facts(METHODS[name]) if name in METHODS else method_class(name), options or {}
    uses: DataUse = facts.uses
    if facts.selection.startswith("validation"):
        uses = replace(uses, labelled="validation")
    if (pool := chosen.get("unlabelled", "few-shot")) in ("base", "all"):
        uses = replace(uses, unlabelled="base" if pool == "base" else "train")
    return replace(uses, names="all") if chosen.get("new_names") or pool == "all" else uses


def learns_from_features(name: str) -> bool:
    """Whether a method trains on features that the frozen image tower computes once, which takes seconds."""
    cls = _read_facts(METHODS[name]) if name in METHODS else method_class(name)
    # The class itself would have to be imported, with torch.
    return any(base.__name__ == "FeatureMethod" for base in cls.__mro__)


def describe_method(name: str) -> dict[str, str]:
    """Return the summary, recipe (a sentence), selection and data use of a method.

    Those of a built-in method are read from its source: importing it would import torch, which takes seconds. Raises
    UsageError for a plug-in that cannot be loaded.
    """
    cls = _read_facts(METHODS[name]) if name in METHODS else method_class(name)
    texts = {
        "summary": vars(cls)["__doc__"] or f"no summary: give {method_paths()[name]} a docstring",
        # Not `inspect.getdoc`, which returns the text of the abstract `Method.recipe` if there is none.
        "recipe": cls.recipe.__doc__ or "the method's own",
        "selection": cls.selection.replace("validation", "validation, 4 images per class"),
        "uses": str(data_use(name)),
    }
    for text in ("summary", "recipe"):
        texts[text] = texts[text].strip().partition("\n")[0].removeprefix("Return ").removesuffix(".")
    return texts


@cache
def _read_facts(path: str) -> Any:
    """Make a class of what a class of a built-in method and its base classes say about themselves in their source.

    It has their `FACTS`, its docstring and that of `recipe`. Importing the method would import torch, which takes
    seconds.
    """
    module, _, class_name = path.partition(":")
    tree = ast.parse(Path(__file__).with_name(f"{module.rpartition('.')[2]}.py").read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: str(node.module) for node in imports for alias in node.names}
    cls = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    # A base that is not imported is in the same module.
    names = [base.id for base in cls.bases if isinstance(base, ast.Name)]
    bases = [_read_facts(f"{homes.get(name, module)}:{name}") for name in names]
    facts: dict[str, Any] = {"__doc__": ast.get_docstring(cls)}
    for node in cls.body:
        if isinstance(node, ast.FunctionDef) and node.name == "recipe":
            facts["recipe"] = type("recipe", (), {"__doc__": ast.get_docstring(node)})
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            name = ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0])
            if name in FACTS and node.value:
                facts[name] = _evaluate(node.value)
    return type(class_name, tuple(bases), facts)


def _evaluate(node: ast.expr) -> Any:
    """Evaluate a literal, or a `DataUse` of literals."""
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    return DataUse(**{str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords})


def method_options(name: str, options: Mapping[str, Any]) -> BaseModel:
    """Fill in the defaults of the method's options; UsageError names the first wrong field and what would work."""
    return validate(method_class(name).Options, options, name, "option")


def build_method(
    name: str, clip: CLIP, space: LabelSpace, options: Mapping[str, Any], seed_generator: torch.Generator
) -> Method:
    """Build a method at its initial values, on the device of `clip`, from `seed_generator` (CPU) alone.

    Raises UsageError for an unknown name or option, or one that does not fit the towers, and for a method that changes
    a tower that is no plain transformer; UserError for a class name whose prompt is too long.
    """
    filled = method_options(name, options)
    check_towers(name, method_class(name).changes, clip.name, clip.plain_towers)
    return method_class(name)(clip, space, filled, seed_generator).to(clip.device)
