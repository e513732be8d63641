"""Train one run in a plain loop that can be killed at any time and resumes with bitwise equal results."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from torch import Tensor

from procap.errors import UserError
from procap.methods import method_class
from procap.methods.features import FeatureMethod
from procap.methods.hooks import DiagnosedMethod, TaughtMethod
from procap.teacher import release_teacher
from runner.checkpoint import TrainState, check_finite, read_checkpoint, save_checkpoint
from runner.config import RunConfig, RuntimeConfig
from runner.devices import set_deterministic
from runner.earlier_runs import preliminary_run, read_initial_run
from runner.engine import Batch, autocast, check_head, fitting_threads, term_gradients
from runner.feature_training import learn_from_features
from runner.meters import Meter, peak_memory, start_memory_peak
from runner.progress_bar import ProgressDisplay
from runner.provenance import describe_environment, provenance
from runner.results import FewShotRecord, Progress, TrainResult, UnlabelledRecord, describe_failure, write_json
from runner.resumable_training import ResumableTraining
from runner.session import Run, Session
from runner.setup import changed_file, set_up
from runner.stop_signals import Interrupted, StopRequest
from runner.train_step import TrainStep
from runner.trained_runs import load_teacher
from runner.validate import Callbacks, Validator
from shards.rng import generator
from shards.transfer import to_device

UNTIMED_STEPS = 5
"""Steps that are left out of images per second, `warmup_steps` in `train.json`."""
PHASES = ("load", "compile", "data", "forward", "backward", "optimizer", "state", "tracking")
UNTIMED_PHASES = ("load", "compile", "tracking", "validation", "statistics")
"""Phases that are not part of the training's seconds; only runs with callbacks have `validation`."""
MEASURE_STEPS = 50
"""Gradient norms of loss terms are measured after an epoch, and no more often than once in this many steps."""
PENDING_STEPS = 32
"""After how many steps the host reads the losses of a GPU, for which it waits; those of a CPU are there at once."""
MAX_REPEATS = 40
"""How often a step is repeated at half the loss scale: the scale begins at 2^16."""


def train(config: RunConfig, runtime: RuntimeConfig, **more: Any) -> TrainResult | Progress:
    """Train the run of `config` in a new session, for scripts; `procap.train` plans it from choices.

    more: arguments of `train_run`.
    """
    return train_run(Session(runtime).get_run(config), **more)


def train_run(
    run: Run,
    *,
    force: bool = False,
    until: int | None = None,
    callbacks: Callbacks | None = None,
    on_held: Callable[[str], object] | None = None,
) -> TrainResult | Progress:
    """Train a run and return the content of `train.json`, or the progress of a paused one; all ranks call this.

    A finished run is read, not repeated, unless it is forced; an interrupted one continues from its last saved state,
    on a CPU with the same final bits as if it had never stopped.
    force: delete the run with its evaluations first. until: pause after this many epochs, if the training has more.
    callbacks: do not change the training, and are not called for a run without steps.
    on_held: called again and again, on all ranks, while another process holds the run; without it that raises LockHeld;
        the run of a method's `first_stage` is waited for in any case.
    Raises LockHeld when another process works on the run, UserError when data or weights have changed, a result cannot
    be written or the loss is not finite; `Interrupted` after SIGINT or SIGTERM.
    """
    if until is not None and until < 1:
        raise ValueError(f"until = {until}: a training pauses after one epoch or more")
    remote = run.session.remote
    if not force:
        # Before the lock: a finished run is only read, also while another process works on it or on a read-only disk.
        remote.pull(run.path, weights=True)
        if finished := read_finished(run):
            remote.push(run.path)
            return finished
    run.trained = None
    if earlier := preliminary_run(run.config):
        # Runs of several seeds may have the same one, so that it is waited for in any case.
        train_run(run.session.get_run(earlier), on_held=on_held or warnings.warn)
    with run.work(resumes=not force, on_held=on_held):
        run.session.group.call_on_first(lambda: run.folder.check_config(run.config, force=force))
        # Another process may have finished the run between the look above and the lock.
        if not force and (finished := read_finished(run)):
            return finished
        with StopRequest() as stop:
            result = _train(_prepare(run, stop, force=force), stop, until, callbacks)
            stop.check(f"{result.status} {run.path}")
    return result


def read_finished(run: Run) -> TrainResult | None:
    """Read the result of a finished run. Raises UserError if data, weights, code or files have changed since."""
    session, config = run.session, run.config
    result = run.read_training() if session.is_first else None
    if result is not None:
        session.check_content(config, config.dataset, result.manifest_digest)
        session.backbones.check(config, result)
        if why := result.changed_code(config):
            raise UserError(why)
        if option := changed_file(config, result.files):
            named = config.options[option]
            raise UserError(
                f"{config.path} was trained on another content of {option} = {named}: restore it, give the new file "
                "another name, or train again with --force"
            )
        read_checkpoint(run.folder.checkpoint_file, result.checkpoint_sha256)
    return session.group.broadcast_object(result)


def _prepare(run: Run, stop: StopRequest, *, force: bool) -> ResumableTraining:
    """Set up a training and, of a method on features, encode its images; only then the run is listed."""
    config, session = run.config, run.session
    if session.runtime.deterministic:
        set_deterministic()
    initial = read_initial_run(run)
    if not issubclass(method_class(config.method), TaughtMethod):
        # Otherwise the peak memory of this run would include the teacher of an earlier one.
        release_teacher()
    start_memory_peak(session.device)
    meter = Meter(session.device, UNTIMED_STEPS, PHASES)
    with meter.phase("load", in_step=False):
        setup = set_up(run, initial, load_teacher(run))
    if isinstance(setup.method, FeatureMethod):
        with meter.phase("features", in_step=False):
            setup = learn_from_features(run, setup, stop, meter)
    if session.is_first:
        if force:
            # Only now: the run that is there stays if the set-up fails.
            session.delete_run(run.path)
        if not run.folder.config_file.exists():
            write_json(run.folder.config_file, config)
    environment = describe_environment(session.device) | {"accelerations": asdict(setup.acceleration)}
    return ResumableTraining(run, setup, meter, environment)


def _train(
    training: ResumableTraining, stop: StopRequest, until: int | None, callbacks: Callbacks | None
) -> TrainResult | Progress:
    """Train to the end or to epoch `until`, and write the result."""
    recipe, group, method, validator = training.config.recipe, training.group, training.setup.method, None
    if training.setup.engine is not None:
        try:
            with fitting_threads(method.clip, recipe.batch_size // group.size):
                validator = Validator(callbacks, training, stop)
                state = train_epochs(training, validator, min(until or recipe.epochs, recipe.epochs))
                if state.epoch < recipe.epochs:
                    return training.finish("paused")
        finally:
            training.engine.close()
        if training.average:
            # Again, because a run that resumes after its last epoch has restored the sums but perhaps other weights.
            training.average.apply()
    if isinstance(method, FeatureMethod):
        method.finish(method.bank)
        check_head(method.head(method.space), training.config.method)
    hint = training.config.stability_hint
    check_finite(method.state_dict(), f"after step {training.state.step}: try {hint}")
    training.meter.settle()
    result = group.call_on_first(lambda: _write_result(training))
    if validator is not None:
        validator.notify(finished=True)
    return result


def train_epochs(training: ResumableTraining, validator: Validator, epochs: int) -> TrainState:
    """Train to the end of epoch `epochs` from the newest saved state; an error is recorded in `progress.json`."""
    try:
        state = training.restore()
        validator.resume()
        session, steps = training.run.session, training.total_steps
        quiet = session.runtime.quiet or not session.is_first
        with ProgressDisplay(training.config.path, steps, done=state.step, quiet=quiet) as display:
            if state.resumed:
                display.print(f"resuming {training.config.path} from step {state.step} of {steps}")
            # A state can lie inside an epoch, whose remaining steps `train_epoch` takes first.
            loop = TrainLoop(training, validator.stop, display)
            for epoch in range(state.epoch, epochs):
                loop.train_epoch(epoch)
                validator.validate()
                if session.is_first:
                    with training.meter.phase("tracking", in_step=False):
                        session.exporter.post_epoch(training.config.path)
                # After the last epoch the callback waits until the result is written.
                if epoch < training.config.recipe.epochs - 1:
                    validator.notify()
        return state
    # `ResumableTraining.stop` has recorded it.
    except Interrupted:
        raise
    except Exception as error:
        # Not where it cannot be written.
        with suppress(UserError, OSError):
            if training.group.ranks.is_first and (progress := training.folder.read_progress()):
                changes = {"status": "failed", "reason": describe_failure(error)}
                write_json(training.folder.progress_file, progress.model_copy(update=changes))
        raise


class TrainLoop:
    """The steps of a training. It can start anywhere, because draws are seeded by epoch, step or image.

    The host runs ahead of a GPU: `state` counts steps whose losses were read, `_pending` holds those of later ones.
    """

    def __init__(self, training: ResumableTraining, stop: StopRequest, display: ProgressDisplay) -> None:
        assert training.setup.step_schedule is not None
        self.training, self.stop, self.display = training, stop, display
        self.runtime = training.run.session.runtime
        self.config, self.state, self.meter = training.config, training.state, training.meter
        self.method, self.step_schedule = training.setup.method, training.setup.step_schedule
        self.group = training.group
        device = self.method.clip.device
        self.graphs = training.setup.acceleration.graphs and self.runtime.engine == "ddp"
        self.train_step = TrainStep(training.engine, self.meter, graphs=self.graphs)
        self._pending: list[Tensor] = []
        self._most_pending = PENDING_STEPS if device.type == "cuda" else 1
        # A measurement takes about two steps: at most 5 % of the training, apart from that after the last epoch.
        epochs = self.config.recipe.epochs
        self._measure_every = -(-MEASURE_STEPS * epochs // max(1, self.step_schedule.total))

    def train_epoch(self, epoch: int) -> None:
        """Take the steps that are left of an epoch, and add it to the log."""
        rate = self.step_schedule.rates(self.step_schedule.first_step(epoch), epoch)[0]
        with autocast(self.config.precision, self.method.clip.device):
            changes_work = self.method.begin_epoch(epoch, rate, self.config.recipe)
        if changes_work:
            # A CUDA graph replays the work of the epochs before.
            self.train_step = TrainStep(self.training.engine, self.meter, graphs=self.graphs)
        batches = self.step_schedule.batches(epoch, start_step=self.state.step_in_epoch)
        for images, labels in self.meter.iterate("data", to_device(batches, self.method.clip.device)):
            self._take_step(epoch, images, labels)
            self._save_or_stop()
        self._count_losses()
        self.meter.settle()
        self.method.end_epoch(epoch, self.config.recipe)
        if average := self.training.average:
            # After `end_epoch`, which may change the tensors. A save before the epoch is closed would count it twice.
            average.add(epoch)
            if epoch == self.config.recipe.epochs - 1:
                average.apply()
        self._close_epoch(epoch)

    def _take_step(self, epoch: int, images: Tensor, labels: Tensor) -> None:
        """Take the next step on a batch, without waiting for its losses."""
        number = self.state.step + len(self._pending)
        stage = self.step_schedule.stage(number)
        if stage != self.state.stage:
            self._count_losses()
            self.training.begin_stage(stage)
            # A CUDA graph replays the work of one stage.
            self.train_step = TrainStep(self.training.engine, self.meter, graphs=self.graphs)
        self.training.engine.set_rates(self.step_schedule.rates(number, epoch))
        batch = Batch.make(self.method, self.config.seed, number, images, labels)
        if self.train_step.needs_capture:
            with self.meter.phase("compile", in_step=False):
                self.train_step.capture(batch)
        outcome = self.train_step(batch)
        if self.config.recipe.iterations and self.config.precision == "fp16":
            # A step that is skipped because gradients overflow does not count towards a budget of iterations, as in the
            # public code of 2SFS: it is repeated at the next loss scale. A loss that is not finite is refused below.
            for _ in range(MAX_REPEATS):
                if not outcome[-1].item():
                    break
                outcome = self.train_step(batch)
        self._pending.append(outcome)
        self.meter.step(self.step_schedule.images(number))

    def _save_or_stop(self) -> None:
        """Save the state if it is time on rank 0, or stop if a rank has got a signal: all ranks at the same step."""
        # The clock of one rank decides, because those of several would not agree on a step.
        is_due = self.group.ranks.is_first and self.training.is_due(self.runtime.state_seconds)
        flags = self.group.exchange_flags(save=is_due, signum=self.stop.signum)
        if flags.save or flags.signum or len(self._pending) >= self._most_pending:
            self._count_losses()
        if flags.signum:
            self.training.stop(flags.signum)
        if flags.save:
            self.training.save()

    def _count_losses(self) -> None:
        """Add the losses of the steps so far to the state, and show the last one; waits for a GPU."""
        for outcome in self._pending:
            *terms, loss, skipped = outcome.tolist()
            named_terms = dict(zip(self.train_step.names, terms, strict=True))
            # Raised before the step is counted: no saved state holds weights after such a loss.
            if not math.isfinite(loss):
                self.training.write_progress("failed")
                shown = ", ".join(f"{name} = {value:g}" for name, value in named_terms.items())
                raise UserError(
                    f"{self.config.path}: the loss of step {self.state.step + 1} of {self.training.total_steps} "
                    f"(epoch {self.state.epoch + 1}) is not finite: {shown}; the same command fails again: train "
                    f"another run with {self.config.stability_hint}"
                )
            self.state.count(self.step_schedule.images(self.state.step), named_terms, bool(skipped))
            rate = self.step_schedule.rates(self.state.step - 1, self.state.epoch)[0]
            position = f"{self.state.epoch + 1}/{self.config.recipe.epochs}"
            self.display.update(self.state.step, epoch=position, loss=loss, lr=rate)
        self._pending.clear()

    def _close_epoch(self, epoch: int) -> None:
        """Add the epoch to the log, with gradient norms."""
        last_rate = self.step_schedule.rates(self.step_schedule.first_step(epoch + 1) - 1, epoch)[0]
        norms: dict[str, float] = {}
        is_last = epoch == self.config.recipe.epochs - 1
        if isinstance(self.method, DiagnosedMethod) and (is_last or (epoch + 1) % self._measure_every == 0):
            with self.meter.phase("statistics", in_step=False):
                norms = measure_terms(self.training)
        self.state.close_epoch(last_rate, self.meter.step_seconds, norms)


def measure_terms(training: ResumableTraining) -> dict[str, float]:
    """Compute the norm of each weighted loss term's gradient, on the training's first batch with the weights of now."""
    method, step_schedule = training.setup.method, training.setup.step_schedule
    assert step_schedule is not None
    device = method.clip.device
    images, labels = (tensor.to(device) for tensor in next(step_schedule.batches(0)))
    # Always the same batch and noise, so that the norms of epochs can be compared.
    noise = method.draw(generator(training.config.seed, "noise", 0))
    objective = training.engine.objective
    terms = objective.separate_terms(images, labels, *(tensor.to(device) for tensor in noise))
    return {
        name: math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
        for name, gradients in term_gradients(objective, terms, training.group)
    }


def _write_result(training: ResumableTraining) -> TrainResult:
    """Write the checkpoint, then `train.json`, which marks the run as finished."""
    setup, state, meter, folder = training.setup, training.state, training.meter, training.folder
    config, selection = training.config, setup.selection
    on_features = isinstance(setup.method, FeatureMethod)
    diagnosed = setup.method if isinstance(setup.method, DiagnosedMethod) else None
    drawn = {name: getattr(config, name) for name in ("shots", "sampling", "seed")}
    for name, document in setup.method.records().items():
        write_json(folder.path / name, document)
    pool = selection.unlabelled if selection else None
    few_shot = None
    # A training on another pool of images has seen no few-shot sample.
    if selection and (pool is None or pool.pool == "few-shot"):
        few_shot = FewShotRecord(**drawn, digest=selection.digest, samples=selection.train.paths)
    unlabelled = UnlabelledRecord(pool=pool.pool, images=len(pool.images), digest=pool.digest) if pool else None
    checkpoint_sha256 = save_checkpoint(folder.checkpoint_file, setup.method, setup.card)
    result = TrainResult(
        config_hash=config.hash,
        steps=state.step,
        images=state.images,
        epochs=state.epochs,
        # Phases of a GPU are timed by its events, which differ a little from the clock of the host.
        seconds=max(0.0, meter.seconds - sum(meter.phases.get(name, 0.0) for name in UNTIMED_PHASES)),
        # The steps of a method on features see no image.
        images_per_second=None if on_features else meter.images_per_second(),
        images_per_second_model=None if on_features else meter.images_per_second("forward", "backward", "optimizer"),
        warmup_steps=meter.untimed_steps if meter.rate.images else 0,
        phases=meter.phases_with_other(),
        stored_seconds=meter.stored_seconds,
        peak_memory_bytes=peak_memory(meter.device),
        trainable_parameters=sum(parameter.numel() for parameter in setup.method.parameters()),
        statistics=diagnosed.statistics() if diagnosed and state.step else {},
        kernels=diagnosed.kernels() if diagnosed else "",
        fewshot=few_shot,
        unlabelled=unlabelled,
        manifest_digest=setup.card.manifest_digest,
        checkpoint_sha256=checkpoint_sha256,
        backbone_digest=setup.card.backbone_digest,
        **provenance(training.environment),
        resumed=state.resumed,
        processes=training.group.size,
        files=dict(setup.file_digests),
        method_source=setup.method_source,
    )
    write_json(folder.train_file, result)
    # Last: until `train.json` is there, a run that is killed resumes from its state.
    folder.forget_progress()
    return result
