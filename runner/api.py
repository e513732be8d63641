"""Train, evaluate and use runs from Python: `procap.Session`.

import procap

session = procap.Session(results="results")
run = session.run(method="coop", dataset="digits", shots=4, classes="all")
run.train()                                   # the content of train.json
print(run.evaluate("digits").accuracy)        # and of eval/digits-all-test.json
probabilities = run.classifier()(["new.jpg"])
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner import session
from runner.config import RuntimeConfig, Target
from runner.evaluate import evaluate_run, load_trained
from runner.planning import plan_run
from runner.remote_results import results_root
from runner.run_state import RunState, read_state
from runner.train import TrainingRequest, train_run
from shards.default_paths import cache_home, data_root
from shards.mirror import refresh
from shards.pack import pack_missing
from shards.reader import ShardSet

if TYPE_CHECKING:
    from procap.methods.method import Method
    from runner.predict import ImageClassifier
    from runner.results import EvalResult, Progress, TrainResult
    from runner.validate import Callbacks


class Session:
    """Where runs lie and how they are executed; the backbone, data sets and tracking store are opened once."""

    def __init__(self, *, data: str | Path = "", results: str | Path = "results", **settings: Any) -> None:
        """data, results: as the flags, also URLs. settings: fields of `runner.config.RuntimeConfig`."""
        # An earlier session may have asked the server.
        refresh.cache_clear()
        folder, url = results_root(str(results), cache_home())
        places: dict[str, Any] = {"data": data_root(str(data)), "results": folder, "results_url": url}
        self._session = session.Session(RuntimeConfig(**places, **settings))

    def run(self, *, method: str, dataset: str, **choices: Any) -> Run:
        """Describe a run, which exists already or not; choices: of `runner.planning.RunChoices`, such as shots=4."""
        data = self._session.runtime.data
        return Run(self._session.run(plan_run(method=method, dataset=dataset, data=data, **choices)))

    def find(self, folder: str | Path) -> Run:
        """Return the run in `folder`."""
        return Run(self._session.locate(Path(folder)))

    def dataset(self, name: str) -> ShardSet:
        """Open a packed data set; generated and bundled ones are packed first."""
        pack_missing([name], self._session.runtime.data)
        return self._session.dataset(name)

    def close(self) -> None:
        """Send what is left to MLflow; the end of the program does so too."""
        self._session.exporter.flush()


class Run:
    """A run of a session. config: everything that decides its learned tensors."""

    def __init__(self, run: session.Run) -> None:
        self._run, self.config, self.folder = run, run.config, run.folder.path

    def state(self, *targets: str) -> RunState:
        """Read what exists of the run and of its evaluations on `targets`, `dataset:classes:split`."""
        return read_state(self._run, targets)

    def train(
        self, *, force: bool = False, until: int | None = None, callbacks: Callbacks | None = None
    ) -> TrainResult | Progress:
        """Train, resume or read the run; see `runner.train.TrainingRequest`. Returns the content of `train.json`."""
        pack_missing([self.config.dataset], self._run.session.runtime.data)
        return train_run(self._run, TrainingRequest(force, until, callbacks))

    def evaluate(self, target: str | Target, *, force: bool = False) -> EvalResult:
        """Count the correct images of a target, `dataset[:classes[:split]]`; returns the content of its result file."""
        data = self._run.session.runtime.data
        parsed = Target.parse(target, data) if isinstance(target, str) else target
        pack_missing([parsed.dataset], data)
        return evaluate_run(self._run, parsed, force=force)

    @property
    def method(self) -> Method:
        """The trained method, loaded once."""
        return load_trained(self._run).method

    def classifier(self, classnames: Sequence[str] = ()) -> ImageClassifier:
        """Make a function of images to probabilities; classnames: others than those that the run learned."""
        from runner.predict import ImageClassifier

        return ImageClassifier(load_trained(self._run), classnames)
