"""The commands of the documentation, in a form that runs on a machine without a network, GPU and published images."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

NOT_RUN = {
    r"make ": "the demo, the tests and the lint of the whole project, which run by themselves",
    r"source \.venv/bin/activate": "the commands run in the environment of the tests",
    r"\.venv/bin/python -m pytest -m gpu": "needs a GPU",
    r"\.venv/bin/pip install": "installs a package into the environment of the tests",
    r"procap check method visual-tokens": "needs that package: tests/test_benchmarks_own_method.py",
    r"sbatch ": "needs Slurm: tests/test_cluster_slurm_slow.py submits both files",
    r"ray start|mkdir -p /tmp/shared": "starts nodes at fixed ports: tests/nodes.py starts them at free ones",
    r"ray stop": "ends every Ray process of the machine",
    r"procap ui": "serves until it is stopped: tests/test_runner_track.py",
    r"procap data pack caltech101": "published images are not here: tests/test_benchmarks_data.py packs small ones",
    r"procap data check --data": "checks what `data fetch` has packed",
    r"procap push": "its dry run reads the environment of the user alone: tests/test_runner_hub.py",
    r"procap eval hf://": "the library reads the address of the Hub when it is imported: tests/test_runner_hub.py",
    r"TORCH_DISABLE_SHARE|torchrun --nnodes": "two hosts: tests/test_runner_launch.py starts two launchers",
}
"""Beginnings of commands that do not run here, with the reason and what tests them instead."""

SUBSTITUTIONS = {
    # Downloads need a network; what they would do is printed.
    r"^(procap data fetch (?!.*--dry-run).*)$": r"\1 --dry-run",
    # Published images are replaced by generated ones, and a published CLIP by the one that ships.
    r" --download": "",
    r"procap fetch backbone .*": "procap fetch backbone mini",
    r"--datasets (dtd,eurosat|imagenet|dtd)": "--datasets digits",
    r"--profile (paper|mini)": "",
    r"--(backbone ViT-B/16|backbone RN50)": "--backbone mini",
    r"--pretrained (openai|RN50\.pt)": "",
    r" --(check|tolerance 1|precision bf16|quick)": "",
    # Places.
    r"--data DATA": "--data {data}",
    r"--results RESULTS": "",
    r"https://example.org/shards": "{web}",
    r"s3://lab/shards": "{bucket}/data",
    r"s3://lab/results": "{bucket}/results",
    r"/tmp/shared/": "{folder}/shared/",
    r"http://127.0.0.1:8265": "{dashboard}",
    r"ray job list": "ray job list --address {dashboard}",
    r"procap export results/base/dtd/maple\S+": "procap export {maple}",
    r"(?<= )(RUN|results/base/\S+)": "{run}",
    # Less of the same.
    r"--datasets shapes,petals,textures,digits,birds\s+--methods .*": "--datasets digits",
    r"((?:procap|--) bench (?!runtime|examples)[\w-]+)": r"\1 --profile mini --quick --epochs 1",
    r"procap bench runtime": "procap bench runtime --profile mini --quick",
    r"(procap bench examples\S+)(.*)": r"\1 --profile mini --quick --epochs 1 --seeds 1 --shots 1 --limit 40"
    r" --datasets digits\2",
    r"(--profile mini --quick --epochs 1)(?!.*--datasets)": r"\1 --datasets digits",
    r"(--datasets digits)(?=.*--datasets)": "",
    r"(bench (?!runtime|cross|examples).*?--quick --epochs 1)(?!.*--methods)": r"\1 --methods coop --seeds 1",
    r"(procap bench all (?!.*--shots).*)": r"\1 --shots 2",
    r"--seeds 1,2,3": "--seeds 1",
    r"--epochs 10": "--epochs 1",
    r"(procap (train|eval) (?!.*--epochs)(?!\{run\}).*)": r"\1 --epochs 1",
    r"--nproc-per-node 4": "--nproc-per-node 2",
    r"--trials 20": "--trials 1",
    r"--param lr=0.00004,\S+": "--param lr=0.00004",
    r"'(out|weights)/\S+'|model\.pth\.tar-5": "{checkpoint}",
    r"--method (maple|promptsrc)": "--method maple",
    # Of the one checkpoint that stands in for all public ones.
    r"--task cross-dataset": "--task cross-dataset --option depth=9",
}
"""What stands in a command of the pages, and what takes its place here, one after another."""


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of `page` in `language`, continued lines joined."""
    texts = re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [text.replace("\\\n", " ") for text in texts]


def shell_lines(page: Path, *languages: str) -> list[str]:
    """Every command of the page, without comments."""
    lines = (line for language in languages for block in blocks(page, language) for line in block.splitlines())
    return [re.sub(r"\s+#.*", "", line).strip() for line in lines if shlex.split(line, comments=True)]


def reason_not_to_run(line: str) -> str:
    return next((reason for start, reason in NOT_RUN.items() if re.match(start, line)), "")


def substitute(line: str) -> str:
    """Return a command as it runs here, with {names} of the places that a test makes."""
    for pattern, replacement in SUBSTITUTIONS.items():
        line = re.sub(pattern, replacement, line)
    return re.sub(r"\s+", " ", line)


@dataclass
class Workplace:
    """A folder with all that the commands of the pages name, and the environment in which a user types them."""

    folder: Path
    environment: dict[str, str]
    places: dict[str, str]

    def run(self, command: str) -> str:
        """Return why a command failed, "" if it did not."""
        words = ["bash", "-c", command.format(**self.places)]
        done = subprocess.run(
            words, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=1200
        )
        return "" if done.returncode == 0 else f"{words[-1]}: {done.returncode}: {done.stderr[-1500:]}"

    def prepare(self) -> None:
        """Make data, images, a finished run of ProCAP, and a public checkpoint of MaPLe."""
        images = np.random.default_rng(0).integers(0, 256, (4, 16, 24, 24, 3)).astype(np.uint8)
        for number, name in enumerate(("ring", "disc", "cross", "square")):
            for folder in (self.folder / "birds" / name, self.folder / "photos"):
                folder.mkdir(parents=True, exist_ok=True)
            for index, image in enumerate(images[number]):
                Image.fromarray(image).save(self.folder / "birds" / name / f"{index}.png")
            Image.fromarray(images[number, 0]).save(self.folder / "photos" / f"{name}.jpg")
        Image.fromarray(images[0, 0]).save(self.folder / "one.jpg")
        Image.fromarray(images[0, 1]).save(self.folder / "two.png")
        with tarfile.open(self.folder / "test-000000.tar", "w") as archive:
            archive.add(self.folder / "one.jpg", "one.jpg")
        (self.folder / "gpt_file").mkdir()
        names = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
        sentences = {name: [f"a photo of the digit {name}"] for name in names}
        (self.folder / "gpt_file" / "dtd_prompt.json").write_text(json.dumps(sentences))
        (self.folder / "examples").symlink_to(ROOT / "examples")
        train = "procap train --datasets digits --epochs 1 --methods"
        for command in (f"{train} procap", f"{train} maple --results public", "procap data pack digits --data {data}"):
            assert not (why := self.run(command)), why
        for name, results in (("run", "results"), ("maple", "public")):
            [file] = (self.folder / results).rglob("config.json")
            self.places[name] = str(file.parent.relative_to(self.folder))
        assert not (why := self.run("procap export {maple} --format dassl --out exported")), why
        [file] = (self.folder / "exported").rglob("model.pth.tar-*")
        self.places["checkpoint"] = str(file.relative_to(self.folder))
