"""Make the pictures of pages again that show what the program shows: python -m tools.pictures FOLDER.

It runs the demo and the suite `qualitative` on generated data in FOLDER, where finished runs are kept, and takes
pictures of the report and of MLflow with chromium: ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

RESULTS = Path(__file__).parents[1] / "docs" / "results"
PROCAP = (sys.executable, "-m", "benchmarks.cli")
PORT = 5917
START_SECONDS = 120


def make_results(folder: Path) -> Path:
    """Run the demo and the suite below `folder`; returns the results, with a report on the demo's suite."""
    results = folder / "results"
    places = ["--data", str(folder / "data"), "--results", str(results)]
    for words in (
        ["demo", "--out", str(folder)],
        ["bench", "qualitative", "--profile", "mini", *places],
        ["report", "base-to-novel", *places],
    ):
        subprocess.run([*PROCAP, *words], check=True)
    return results


def photograph(url: str, file: Path, size: tuple[int, int], wait_seconds: int = 5) -> None:
    """Write what chromium shows of a page, after its scripts had `wait_seconds`."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("chromium is needed: apt install chromium")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    flags += [f"--window-size={size[0]},{size[1]}", f"--virtual-time-budget={1000 * wait_seconds}"]
    subprocess.run([chromium, *flags, f"--screenshot={file}", url], check=True, stderr=subprocess.DEVNULL)


@contextmanager
def mlflow(results: Path) -> Iterator[dict[str, str]]:
    """Serve MLflow in the block; yields the links of `procap ui`."""
    words = [*PROCAP, "ui", "--results", str(results), "--suite", "base-to-novel", "--port", str(PORT), "--json"]
    # In its own process group, so that its workers end with it.
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert server.stdout is not None
        links = json.loads(server.stdout.readline())
        for _ in range(START_SECONDS):
            try:
                urlopen(f"http://127.0.0.1:{PORT}/health").close()
                break
            except URLError:
                time.sleep(1)
        yield links
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()


def main(folder: Path) -> None:
    results = make_results(folder.absolute())
    photograph(
        (results / "report-base-to-novel" / "index.html").as_uri(), RESULTS / "paper" / "report.png", (1400, 900)
    )
    shutil.copy(results / "collections" / "suite" / "qualitative" / "predictions.png", RESULTS / "paper")
    with mlflow(results) as links:
        photograph(links["side by side"], RESULTS / "mlflow" / "side-by-side.png", (1400, 900), wait_seconds=30)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of data and results")
    main(parser.parse_args().folder)
