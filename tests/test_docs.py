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
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from documented import NOT_RUN, PAGES, ROOT, Workplace, blocks, reason_not_to_run, shell_lines, substitute
from local_server import LocalServer
from nodes import SETTINGS, Nodes
from own_images import put_classes
from PIL import Image
from plug_ins import install

from benchmarks.cli import main
from procap.errors import UsageError
from shards.remote import upload
from tools import site
from tools.notebook import NOTEBOOK, digest_code

README_BYTES = 10_240


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


MORE_TOKENS = ("low-rank", "aligned", "averaged", "near", "online", "patch", "taught")
"""The classes of one example of the page on extending."""


def run_blocks(page: Path, folder: Path) -> None:
    (folder / "tests").symlink_to(ROOT / "tests")
    environment = typed_environment(folder) | {"PYTHONPATH": f"{folder}:{ROOT}"}
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


def test_the_site_links_to_files_of_the_repository():
    config = SimpleNamespace(repo_url="https://host/owner/name")
    for page in (ROOT / "docs").rglob("*.md"):
        source = SimpleNamespace(file=SimpleNamespace(src_uri=page.relative_to(ROOT / "docs").as_posix()))
        shown = site.on_page_markdown(page.read_text(), page=source, config=config)
        for target in re.findall(r"\]\(([^)#\s]+)", shown):
            if target.startswith(config.repo_url):
                assert (ROOT / target.removeprefix(f"{config.repo_url}/blob/main/")).exists(), f"{page.name}: {target}"
            elif not re.match(r"[a-z]+:", target):
                assert (page.parent / target).resolve().is_relative_to(ROOT / "docs"), f"{page.name}: {target}"


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


NO_NETWORK = {"https_proxy": "http://127.0.0.1:1", "no_proxy": "127.0.0.1"}
"""A proxy that does not answer: no test depends on servers of others."""


def typed_environment(folder: Path) -> dict[str, str]:
    """The environment of a user who has activated the project's, without settings of this machine."""
    inherited = {name: value for name, value in os.environ.items() if not re.match("PROCAP_|MLFLOW_|RAY_", name)}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return inherited | {"PROCAP_HOME": str(folder / "home"), "PATH": path, **NO_NETWORK}


@pytest.fixture
def workplace(tmp_path, s3):
    """A folder for the commands of a page, with a web server and an object store that have its data."""
    environment, bucket = typed_environment(tmp_path) | s3.environment, f"s3://{s3.bucket}/{tmp_path.name}"
    places = {"folder": str(tmp_path), "data": str(tmp_path / "data"), "bucket": bucket}
    place = Workplace(tmp_path, environment, places)
    place.prepare()
    for file in (file for file in (tmp_path / "data").rglob("*") if file.is_file()):
        upload(file, f"{bucket}/{file.relative_to(tmp_path)}")
    with LocalServer(tmp_path / "data") as server:
        place.places["web"] = server.url
        yield place


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if shell_lines(page, "sh")], ids=lambda page: page.stem)
def test_every_command_of_a_page_runs_as_users_type_it(page, workplace):
    lines = [substitute(line) for line in shell_lines(page, "sh") if not reason_not_to_run(line)]
    with ExitStack() as stack:
        if any("--launcher ray" in line for line in lines):
            nodes = stack.enter_context(Nodes(workplace.folder / "nodes", environment=workplace.environment))
            nodes.start_head(cpus=1, dashboard=True)
            for _ in range(2):
                nodes.add(cpus=1)
            workplace.environment |= {**SETTINGS, "RAY_ADDRESS": nodes.address}
            workplace.places["dashboard"] = nodes.dashboard
        failures = [why for line in lines if (why := workplace.run(line))]
    assert not failures, "\n".join(failures)


PLANNED = re.compile(r"procap (train|eval|bench|sweep|data pack|data fetch) (?!.*(\{[rwb]|sentences=|examples))")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_with_a_plan_can_be_planned(page, tmp_path, monkeypatch, capsys, few_digits):
    """Of runs that are named by a path of their own, the slow test makes one."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"PROCAP_HOME": str(tmp_path / "home"), **NO_NETWORK}.items():
        monkeypatch.setenv(name, value)
    put_classes(tmp_path / "birds")
    assert main(["data", "pack", "birds"]) == 0
    places = {"data": str(few_digits), "folder": str(tmp_path)}
    lines = [substitute(line) for line in shell_lines(page, "sh") if not reason_not_to_run(line)]
    for line in filter(PLANNED.match, lines):
        words = shlex.split(line.format(**places))[1:]
        assert main([*words, *["--dry-run"] * ("--dry-run" not in words)]) == 0, (line, capsys.readouterr().err)


def test_the_tables_of_commands_have_no_entry_without_a_command():
    lines = [line for page in PAGES for line in shell_lines(page, "sh", "bash")]
    unused = [start for start in NOT_RUN if not any(re.match(start, line) for line in lines)]
    assert not unused


def run_python(code: str, folder: Path) -> str:
    """Run Python code in a new folder, and return what it prints."""
    environment = os.environ | {"PROCAP_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_python_of_readme_and_python_page_runs(tmp_path):
    *code, loop = blocks(ROOT / "docs" / "python.md", "python")
    code.append("print(training.status, result.accuracy > 75, len(frame), len(features.paths), *probabilities.shape)")
    assert run_python("\n".join(code), tmp_path).splitlines()[-1] == "finished True 1 898 1 10"
    (accuracy,) = run_python("\n".join(blocks(ROOT / "README.md", "python")), tmp_path).splitlines()
    assert float(accuracy) > 90
    assert float(run_python(loop, tmp_path)) > 0.9


def test_the_notebook_has_the_outputs_and_pictures_of_its_code():
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["metadata"]["procap"]["code"] == digest_code(notebook), "python -m tools.notebook executes it"
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", ())]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert sum("image/png" in output.get("data", ()) for output in outputs) == 2


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    notebook = json.loads(NOTEBOOK.read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert "| MaPLe " in run_python("\n".join(cells), tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_blocks_compile(page):
    for block in blocks(page, "python"):
        compile(block, page.name, "exec")
