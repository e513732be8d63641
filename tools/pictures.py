"""Make the pictures of pages again that show the report, predictions and MLflow: python -m tools.pictures FOLDER.

FOLDER gets data and results of the demo and of the suite `qualitative`; finished runs in it are kept. Chromium takes
the pictures (apt install chromium). Five minutes on two cores.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from PIL import Image

PAGES = Path(__file__).parents[1] / "docs" / "results"
PROCAP = (sys.executable, "-m", "benchmarks.cli")
SIZE, MLFLOW_PART = (1400, 900), (195, 0, 1035, 680)
"""The window, and the part of MLflow's page between its menu and its assistant."""


def photograph(url: str, file: Path, wait_seconds: int) -> None:
    """Write what chromium shows of a page, after its scripts had `wait_seconds`."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    flags += [f"--window-size={SIZE[0]},{SIZE[1]}", f"--virtual-time-budget={1000 * wait_seconds}"]
    subprocess.run(["chromium", *flags, f"--screenshot={file}", url], check=True, stderr=subprocess.DEVNULL)


def photograph_mlflow(results: Path, file: Path) -> None:
    """Serve MLflow until the comparison of the demo's runs is photographed."""
    words = [*PROCAP, "ui", "--results", str(results), "--suite", "base-to-novel", "--json"]
    # In its own process group, so that its workers end with it.
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["side by side"]
        while True:
            try:
                urlopen(f"{url.partition('#')[0]}health").close()
                break
            except URLError:
                time.sleep(1)
        photograph(url, file, wait_seconds=30)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()
    Image.open(file).crop(MLFLOW_PART).save(file)


if __name__ == "__main__":
    folder, places = Path(sys.argv[1]).absolute(), ["--data", "data", "--results", "results"]
    folder.mkdir(parents=True, exist_ok=True)
    results, suite = folder / "results", ["bench", "qualitative", "--profile", "mini"]
    for command in (["demo", "--out", "."], [*suite, *places], ["report", "base-to-novel", *places]):
        # There, because the report shows the names of folders as they are given.
        subprocess.run([*PROCAP, *command], check=True, cwd=folder)
    page = (results / "report-base-to-novel" / "index.html").as_uri()
    photograph(page, PAGES / "paper" / "report.png", wait_seconds=5)
    shutil.copy(results / "collections" / "suite" / "qualitative" / "predictions.png", PAGES / "paper")
    photograph_mlflow(results, PAGES / "mlflow" / "side-by-side.png")
