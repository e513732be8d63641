"""The results of `procap bench all --profile mini --quick`, frozen: without weights, as one archive of JSON documents.

The tables that they give lie beside it in tests/golden/. After a deliberate change of a table, rewrite them:
`python tests/golden_results.py`, and read the difference before it is committed.
"""

import contextlib
import functools
import io
import json
import lzma
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest import mock

from benchmarks.cli import main
from benchmarks.experiment.suite import SuiteOptions, Variant
from benchmarks.suites import load_suite
from benchmarks.suites.ablation import VARIANTS
from benchmarks.tables.render import render, to_dict
from benchmarks.tables.table import Table
from procap.methods import method_class
from runner.config import RunConfig
from runner.results import EvalResult, TrainResult

GOLDEN = Path(__file__).with_name("golden")
SUITES = (
    "base-to-novel", "stability", "cross-dataset", "domain-generalization", "few-shot", "ablation", "prompt-length",
    "sensitivity", "duration", "runtime", "qualitative",
)  # fmt: skip


def frozen_variants(options: SuiteOptions, method: str) -> list[Variant]:
    """The variants of the frozen ablation: one token set without cross-attention, and MaPLe with four tokens."""
    if method == "maple":
        return [Variant(method, "MaPLe-style", {"variant": "MaPLe-style"}, {"n_ctx": 4}, recipe="procap")]
    named = {"w/o Cross-Attn": {"cross_attention": False}}
    named |= {name: changed for name, changed in VARIANTS.items() if "Cross-Attn" not in name and "All" not in name}
    return [Variant(method, name, {"variant": name}, changed, recipe="procap") for name, changed in named.items()]


COMMANDS = {
    **{name: [name] for name in SUITES},
    "runtime": ["runtime", "--classes", "all"],
    "runs": [],
    "rounding": ["stability", "--paper-rounding"],
}
"""The arguments of `procap table` that print the table of each golden file."""
ABLATION = replace(load_suite("ablation"), variants=frozen_variants)
"""The ablation with the variants of the frozen runs; the suite has other readings of MaPLe-style and w/o Cross-Attn."""
DEFAULTS_THEN = {"class_prompt": "maple"}
"""Options of ProCAP whose defaults were others when the results were frozen."""
RUN = re.compile(r"\w+/[\w-]+/\w+/[\w-]+/\w+/seed\d+-[0-9a-f]{8}")
"""The path of a run, which ends with the hash of its configuration."""
PICTURED = {
    "all/petals/maple/mini/16shot/seed1-0d5c2a55": "base/petals/maple/mini/16shot/seed1-616241a6",
    "all/petals/procap/mini/16shot/seed1-f2e00930": "base/petals/procap/mini/16shot/seed1-1a8f8406",
    "all/tiles/maple/mini/16shot/seed1-ad850bef": "base/tiles/maple/mini/16shot/seed1-ffb882e6",
    "all/tiles/procap/mini/16shot/seed1-59c4c98e": "base/tiles/procap/mini/16shot/seed1-80cc692a",
}
"""The pictured runs of base classes, by those of all classes that were pictured when the results were frozen."""


def write_results(folder: Path) -> dict[str, str]:
    """Write the frozen runs to `folder`, each where its configuration belongs now; gives new paths by old ones."""
    documents = _documents()
    paths = {}
    for name, document in documents.items():
        if name.endswith("/config.json"):
            paths[name.removesuffix("/config.json")] = RunConfig.model_validate(document)
    text = {old: config.path for old, config in paths.items()}
    for name, document in documents.items():
        found = RUN.match(name)
        if found:
            config = paths[found[0]]
            name = config.path + name.removeprefix(found[0])
            document = {**document, **({"config_hash": config.hash} if "config_hash" in document else {})}
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(RUN.sub(lambda path: text.get(path[0], path[0]), json.dumps(document)))
    return text


def print_tables(results: Path, name: str) -> dict[str, str]:
    """What `procap table` prints for the golden files of one name, by format; the tables are computed once."""
    tables: list[Table] = []

    def collect(table: Table, form: str) -> str:
        tables.append(table)
        return render(table, form)

    printed = io.StringIO()
    with (
        mock.patch("benchmarks.cli.table.render", collect),
        mock.patch.dict("benchmarks.suites.SUITES", {"ablation": f"{__name__}:ABLATION"}),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        assert main(["table", *COMMANDS[name], "--results", str(results), "--format", "md"]) == 0, name
    texts = {form: "\n\n".join(render(table, form) for table in tables) + "\n" for form in ("csv", "latex")}
    document = {"suite": name, "tables": [to_dict(table) for table in tables]}
    return {**texts, "md": printed.getvalue(), "json": json.dumps(document, ensure_ascii=False) + "\n"}


def _renew(name: str, document: dict) -> None:
    """Bring a document of a frozen run to today's schema."""
    kinds = {"config.json": RunConfig, "train.json": TrainResult}
    kind = EvalResult if "/eval/" in name else kinds.get(name.rpartition("/")[2])
    if kind is None:
        return
    for field in document.keys() - kind.model_fields.keys() - {"schema"}:
        del document[field]
    if kind is RunConfig:
        options = method_class(document["method"]).Options
        known = {field: value for field, value in document["options"].items() if field in options.model_fields}
        document["options"] = options(**known).model_dump(mode="json")
    else:
        document |= {"written": "2026-01-01T00:00:00Z", "program": "0.1.0"}
        if samples := document.get("fewshot"):
            samples["samples"] = samples.pop("picks")
            del samples["source"]
        if calibration := document.get("calibration"):
            calibration.pop("equal_mass")


@functools.cache
def _documents():
    documents = json.loads(lzma.decompress((GOLDEN / "quick_results.json.xz").read_bytes()))
    for name, document in documents.items():
        if name.endswith("/collection.json") or name.endswith("/runtime.json"):
            document["settings"]["options"] = {"procap": DEFAULTS_THEN}
    for name, document in documents.items():
        _renew(name, document)
    # The pictures were frozen with runs of all classes; the suite now has those of base classes of the same data sets.
    folder = "collections/suite/qualitative"
    for file in (f"{folder}/pictures.json", f"{folder}/collection.json"):
        documents[file] = json.loads(RUN.sub(lambda path: PICTURED.get(path[0], path[0]), json.dumps(documents[file])))
    return documents


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        back = {new: old for old, new in write_results(Path(place)).items()}
        for golden in sorted(GOLDEN.glob("*.*")):
            if golden.suffix != ".xz" and golden.stem in (sys.argv[1:] or COMMANDS):
                text = print_tables(Path(place), golden.stem)[golden.suffix[1:]]
                golden.write_text(RUN.sub(lambda path: back.get(path[0], path[0]), text).replace(place, "RESULTS"))
