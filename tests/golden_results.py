"""The results of `procap bench all --profile mini --quick`, frozen: without weights, as one archive of JSON documents.

The tables that they give lie beside it in tests/golden/. After a deliberate change of a table, rewrite them with
`python tests/golden_results.py [NAME ...]`, and read the difference before it is committed. After a change of the
documents, first freeze a results folder again: `python tests/golden_results.py --freeze RESULTS`.
"""

import contextlib
import io
import json
import lzma
import os
import re
import sys
import tempfile
from pathlib import Path
from unittest import mock

from benchmarks.cli import main
from benchmarks.tables.render import render, to_dict
from benchmarks.tables.table import Table
from runner.config import RunConfig

GOLDEN = Path(__file__).with_name("golden")
ARCHIVE = GOLDEN / "quick_results.json.xz"
SUITES = (
    "base-to-novel", "stability", "cross-dataset", "domain-generalization", "few-shot", "ablation", "prompt-length",
    "sensitivity", "duration", "runtime", "qualitative",
)  # fmt: skip
COMMANDS = {
    **{name: [name] for name in SUITES},
    "runs": [],
}
"""The arguments of `procap table` that print the table of each golden file."""
RUN = re.compile(r"\w+/[\w-]+/\w+/[\w-]+/\w+/seed\d+-[0-9a-f]{8}")
"""The path of a run, which ends with the hash of its configuration."""


def freeze(results: Path) -> None:
    """Write the documents below `results` to the archive, but for what a command derives from them."""
    patterns = ("*/*/*/*/*/seed*/*.json", "*/*/*/*/*/seed*/eval/*.json", "runtime/*/runtime.json")
    names = ("collection.json", "pictures.json")
    files = [file for pattern in patterns for file in results.glob(pattern)]
    files += [file for name in names for file in results.glob(f"collections/suite/*/{name}")]
    documents = {file.relative_to(results).as_posix(): json.loads(file.read_text()) for file in sorted(files)}
    ARCHIVE.write_bytes(lzma.compress(json.dumps(documents).encode(), preset=9))


def write_results(folder: Path) -> dict[str, str]:
    """Write the frozen runs to `folder`, each where its configuration belongs now; gives new paths by old ones."""
    documents = json.loads(lzma.decompress(ARCHIVE.read_bytes()))
    configs = {
        name.removesuffix("/config.json"): RunConfig.model_validate_json(json.dumps(document))
        for name, document in documents.items()
        if name.endswith("/config.json")
    }
    paths = {old: config.path for old, config in configs.items()}
    for name, document in documents.items():
        if run := RUN.match(name):
            config = configs[run[0]]
            name = config.path + name.removeprefix(run[0])
            document = {**document, **({"config_hash": config.hash} if "config_hash" in document else {})}
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(RUN.sub(lambda path: paths.get(path[0], path[0]), json.dumps(document)))
    return paths


def print_tables(results: Path, name: str) -> dict[str, str]:
    """What `procap table` prints for the golden files of one name, by format; the tables are computed once."""
    tables: list[Table] = []

    def collect(table: Table, form: str) -> str:
        tables.append(table)
        return render(table, form)

    printed = io.StringIO()
    with (
        mock.patch("benchmarks.cli.table.render", collect),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        assert main(["table", *COMMANDS[name], "--results", str(results), "--format", "md"]) == 0, name
    texts = {form: "\n\n".join(render(table, form) for table in tables) + "\n" for form in ("csv", "latex")}
    document = {"suite": name, "tables": [to_dict(table) for table in tables]}
    return {**texts, "md": printed.getvalue(), "json": json.dumps(document, ensure_ascii=False) + "\n"}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--freeze"]:
        freeze(Path(sys.argv[2]))
        sys.exit()
    with tempfile.TemporaryDirectory() as folder:
        # The data sets of this machine are none of the table's.
        os.environ["PROCAP_HOME"] = folder
        earlier = {new: old for old, new in write_results(Path(folder)).items()}
        for golden in sorted(GOLDEN.glob("*.*")):
            if golden.suffix != ".xz" and golden.stem in (sys.argv[1:] or COMMANDS):
                text = print_tables(Path(folder), golden.stem)[golden.suffix[1:]]
                golden.write_text(RUN.sub(lambda path: earlier.get(path[0], path[0]), text).replace(folder, "RESULTS"))
