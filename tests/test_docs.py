"""The documentation: links lead somewhere, commands exist with their flags, and the runnable ones run."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from plug_ins import install

from benchmarks.cli import main
from procap.errors import UsageError

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
README_BYTES = 10_240


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of `page` in `language`, continued lines joined."""
    found = re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [block.replace("\\\n", " ") for block in found]


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def commands(page):
    """The words of every `procap` command of `page`, also behind `torchrun`, `deepspeed` or `procap submit --`."""
    lines = (line for language in ("bash", "sh") for block in blocks(page, language) for line in block.splitlines())
    for line in lines:
        words = shlex.split(line, comments=True)
        starts = [
            number
            for number, word in enumerate(words)
            if word == "procap" and (number == 0 or words[number - 1] in ("--no-python", "--no_python"))
        ]
        for start in starts:
            command = words[start + 1 :]
            if command[:1] == ["submit"]:
                yield command[: command.index("--")]
                command = command[command.index("--") + 1 :]
            yield command


def unknown_words(words: list[str]) -> list[str]:
    """The command names and flags among `words` that the command line does not have."""
    import typer

    from benchmarks.cli.app import program

    command: Any = typer.main.get_command(program)
    context = command.make_context("procap", ["--help"], resilient_parsing=True)
    rest = list(words)
    while hasattr(command, "get_command") and rest:
        name = rest.pop(0)
        try:
            command = command.get_command(context, name)
        except UsageError:
            return [name]
    known = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    flags = [word.split("=")[0] for word in rest if re.match(r"--?[a-z]", word)]
    return [flag for flag in flags if flag not in known | {"--help", "-h"}]


MORE_TOKENS = ("low-rank", "aligned", "averaged", "near", "taught")
"""The classes of one example of the page on extending."""


def run_blocks(page: Path, folder: Path) -> None:
    (folder / "tests").symlink_to(ROOT / "tests")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PROCAP_", "MLFLOW_", "RAY_"))},
        "PROCAP_HOME": str(folder / "home"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{folder}:{ROOT}",
    }
    command = ["bash", "-c", "\n".join(["set -e", *blocks(page, "bash")])]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]


def write_examples(page: Path, folder: Path) -> None:
    """Write the files that `page` shows below their names, and install the package that they make."""
    example = r"`([\w-]+\.(?:py|yaml|toml))`[^`]*?:\n\n```\w+\n(.*?)^```"
    for name, text in re.findall(example, page.read_text(), re.M | re.S):
        (folder / name).write_text(text)
    assert main(["new", "method", "visual-tokens", "--out", str(folder / "new")]) == 0
    written = folder / "new" / "visual-tokens"
    shutil.copy(written / "visual_tokens.py", folder)
    points = tomllib.loads((written / "pyproject.toml").read_text())["project"]["entry-points"]["procap.methods"]
    others = {"class-weights": "class_weights:ClassWeights", "noisy-tokens": "noisy_tokens:NoisyTokens"}
    more = {f"{name}-tokens": f"more_tokens:{name.title().replace('-', '')}Tokens" for name in MORE_TOKENS}
    install(folder, {}, points | others | more)
    for number, name in enumerate(("disc", "square", "ring", "cross")):
        (folder / "my-photos" / name).mkdir(parents=True)
        for image in range(10):
            Image.new("RGB", (48, 48), (60 * number, 20 * image, 90)).save(folder / "my-photos" / name / f"{image}.png")


def test_the_readme_is_an_entrance():
    assert (ROOT / "README.md").stat().st_size <= README_BYTES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_files_and_headings(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(linked), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_and_their_flags_exist(page, tmp_path, monkeypatch):
    if page.stem == "extending":
        write_examples(page, tmp_path)
        monkeypatch.chdir(tmp_path)
    for words in commands(page):
        assert not unknown_words(words), f"{page.name}: procap {shlex.join(words)}: {unknown_words(words)}"
    for name in re.findall(r"python -m ([\w.]+)", page.read_text()):
        if name.startswith("benchmarks") and "NAME" not in name:
            assert importlib.util.find_spec(name), f"{page.name}: python -m {name}"
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for line in (line for block in blocks(page, "sh") for line in block.splitlines() if line.startswith("make ")):
        assert line.split()[1] in targets, f"{page.name}: {line}"


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "bash")], ids=lambda page: page.stem)
def test_the_commands_of_a_page_run(page, tmp_path):
    if page.stem == "extending":
        write_examples(page, tmp_path)
    run_blocks(page, tmp_path)


def run_python(code: str, folder: Path) -> str:
    """Run Python code in a new folder, and return what it prints."""
    environment = os.environ | {"PROCAP_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_python_of_the_training_page_runs(tmp_path):
    code = blocks(ROOT / "docs" / "training.md", "python")
    code.append("print(len(training.epochs), result.total, len(frame), len(features.paths), *probabilities.shape)")
    assert run_python("\n".join(code), tmp_path).splitlines()[-1] == "2 540 1 898 1 10"


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    notebook = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert "| **MaPLe** " in run_python("\n".join(cells), tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_blocks_compile(page):
    for block in blocks(page, "python"):
        compile(block, page.name, "exec")
