"""Search hyperparameters with Ray Tune: a trial trains all runs of one configuration and resumes from their folders."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from cluster.executor import TrialWork
from cluster.ray_cluster import Capacity
from cluster.space import to_tune
from cluster.sweep_record import SWEEPS, Configuration, SweepFolder, SweepSettings, key_of, make_runs, read_scores
from cluster.trial import SCORE, Halving, StoragePaths, TrialReport
from cluster.tune_runner import TrialListener, run_trials
from procap.errors import UserError
from runner.run_state import RunSpec, final_score, score_at
from runner.session import Session
from shards.rng import stream_seed


class Sweep:
    """Execute a sweep with Ray Tune and keep its configurations up to date."""

    def __init__(self, settings: SweepSettings, session: Session, folder: SweepFolder) -> None:
        self.settings, self.session, self.folder = settings, session, folder
        known = folder.load_configurations(settings)
        self.configurations = {key_of(stored.values): self._recheck(stored) for stored in known}
        self._running: dict[str, str] = {}
        self._deadline = math.inf

    def _recheck(self, stored: Configuration) -> Configuration:
        """Return a configuration with the scores that results have now; an unfinished one tries failed runs again."""
        if stored.state == "unfinished":
            return stored.model_copy(update={"error": ""})
        if stored.state != "finished" or not stored.runs:
            return stored
        with suppress(UserError):
            runs = make_runs(self.settings, stored.values, self.session.runtime.data)
            if all(final_score(self.session.get_run(run.config), run.targets) is not None for run in runs):
                return read_scores(stored, self.session)
        return stored.model_copy(update={"state": "unfinished", "scores": {}})

    def count(self, *states: str) -> int:
        """Count configurations in these states; those that ASHA stopped continue once the sweep no longer uses ASHA."""
        counted = [state for state in states if state != "stopped" or self.settings.scheduler == "asha"]
        return sum(configuration.state in counted for configuration in self.configurations.values())

    def run(self, paths: StoragePaths, capacity: Capacity, listener: TrialListener) -> None:
        """Execute what is left until it is done or the time is up. listener: passes its calls on to this sweep."""
        settings = self.settings
        seconds = None if settings.hours is None else 3600 * settings.hours
        self._deadline = time.monotonic() + (math.inf if seconds is None else seconds)
        space, tune_config = self._make_search(capacity.max_concurrent)
        halving = None
        if settings.scheduler == "asha":
            from ray.tune.schedulers import ASHAScheduler

            halving = Halving(settings.grace_period, settings.reduction_factor)
            tune_config["scheduler"] = ASHAScheduler(
                # ASHA's default, `training_iteration`, counts reports, also those of a trial that waits for a lock.
                time_attr="epoch",
                metric=SCORE,
                mode="max",
                # More epochs than any training has: a trial ends by itself.
                max_t=10**6,
                **halving._asdict(),
            )
        work = TrialWork.on(capacity, paths, settings.runs_of_trial, halving)
        run_trials(space, work, capacity, listener, time_budget_s=seconds, **tune_config)

    def _make_search(self, max_concurrent: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Make the search space for Tune and the search's part of `TuneConfig`."""
        from ray.tune.search.basic_variant import BasicVariantGenerator

        settings = self.settings
        grid = settings.search == "grid"
        space = {field: to_tune(domain, grid=grid) for field, domain in settings.domains.items()}
        if settings.search == "tpe":
            searcher, left = self._make_optuna(space)
            # The searcher holds the space; Tune refuses it a second time in `param_space`.
            return {}, {"search_alg": searcher, "num_samples": left, "max_concurrent_trials": max_concurrent}
        # The generator draws the same points in every attempt; trials whose runs are finished end at once, from their
        # files, so that all of them count. Of a grid, `num_samples` would be the number of its repetitions.
        generator = BasicVariantGenerator(max_concurrent=max_concurrent, random_state=settings.search_seed)
        return space, {"search_alg": generator, "num_samples": 1 if grid else settings.trials or -1}

    def _make_optuna(self, space: Mapping[str, Any]) -> tuple[Any, int]:
        """Make Optuna's TPE (Bergstra et al. 2011) with the scores so far; return it and how many trials are left."""
        import optuna
        from ray.tune.search.optuna import OptunaSearch

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        # Those that ASHA stopped continue without it, as in `count`.
        done = ("finished", "stopped") if self.settings.scheduler == "asha" else ("finished",)
        tried = list(self.configurations.values())
        scored = [stored for stored in tried if stored.state in done and stored.score is not None]
        unfinished = [stored.values for stored in tried if stored not in scored]
        # Startup draws depend only on the seed: a continued sweep needs another seed, or it would draw them again.
        # Optuna's random numbers are numpy's, whose seeds have 32 bits.
        seed = stream_seed(self.settings.search_seed, "tpe", len(scored)) % 2**32
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", category=optuna.exceptions.ExperimentalWarning)
            # The constant liar keeps concurrent trials from choosing nearly the same point.
            sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        domains = OptunaSearch.convert_search_space(dict(space))
        # Configurations without a score are tried first and count as trials that are left.
        points = unfinished or None
        searcher = OptunaSearch(domains, metric=SCORE, mode="max", points_to_evaluate=points, sampler=sampler)
        for configuration in scored:
            assert configuration.score is not None
            searcher.add_evaluated_point(dict(configuration.values), configuration.score)
        return searcher, -1 if self.settings.trials is None else max(0, self.settings.trials - len(scored))

    def started(self, trial: str, drawn: Mapping[str, Any]) -> Configuration:
        values = self.settings.values_of_trial(drawn)
        key = self._running[trial] = key_of(values)
        before = self.configurations.get(key)
        if before is None or before.state in ("stopped", "failed"):
            runs: list[RunSpec] = []
            # Invalid values are reported when the trial itself fails on them.
            with suppress(UserError):
                runs = make_runs(self.settings, values, self.session.runtime.data)
            self.configurations[key] = Configuration(
                values=values,
                runs=tuple(dict.fromkeys(run.path for run in runs)),
                curve=before.curve if before else {},
                epochs=max((run.config.recipe.epochs for run in runs), default=0),
            )
            self.folder.save(self.settings, self.configurations.values())
        return self.configurations[key]

    def reported(self, trial: str, drawn: Mapping[str, Any], report: TrialReport) -> Configuration:
        key = self._running[trial]
        if report.score is not None and report.epoch:
            self._update(key, curve={**self.configurations[key].curve, report.epoch: report.score})
        return self.configurations[key]

    def ended(self, trial: str, drawn: Mapping[str, Any], report: TrialReport) -> tuple[Configuration, bool]:
        """Return the configuration of the trial, and whether the configuration has ended with it."""
        key = self._running.pop(trial)
        before, scores = self.configurations[key], dict[str, float]()
        error = report.why if report.state == "failed" else ""
        try:
            scores = self._collect_scores(self.settings.runs_of_trial(drawn, self.session.runtime), report)
        except UserError as unreadable:
            error = error or str(unreadable)
        if report.state == "finished" and not all(path in scores for path in before.runs):
            error = error or "results not found; is --results on shared storage?"
        state = "failed" if error else "finished"
        if report.state in ("running", "waiting") and not error:
            # Either ASHA or the time limit stopped the trial early; after the time limit it stays unfinished.
            state = "stopped" if before.curve and time.monotonic() < self._deadline else "unfinished"
        # Grid and random search replay configurations that an earlier attempt has finished: these keep their state.
        is_settled = before.state == "unfinished" and state != "unfinished"
        self._update(key, scores=scores, error=error, state=state if is_settled else before.state)
        if is_settled:
            self.session.remote.try_push(f"{SWEEPS}/{self.settings.name}")
        return self.configurations[key], is_settled

    def _collect_scores(self, runs: Sequence[RunSpec], report: TrialReport) -> dict[str, float]:
        """Collect the scores of a trial's runs; if it was stopped, at the last epoch that all runs have finished."""
        scores: dict[str, float] = {}
        for spec in runs:
            run = self.session.get_run(spec.config)
            # Behind a URL the files are on the node that trained the run and at the URL, not yet here.
            self.session.remote.pull(run.path)
            score = final_score(run, spec.targets)
            if score is None and report.state == "running" and report.epoch:
                # Reports count finished epochs from 1, the counts on disk number them from 0.
                score = score_at(run, spec.targets, report.epoch - 1)
            if score is not None:
                scores[run.path] = score
        return scores

    def _update(self, key: str, **changes: Any) -> None:
        self.configurations[key] = self.configurations[key].model_copy(update=changes)
        self.folder.save(self.settings, self.configurations.values())
