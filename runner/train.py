"""Train one run in a plain loop that can be killed at any time and resumes with bitwise equal results."""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext, suppress
from typing import Any

from procap.errors import UserError
from runner.checkpoint import TrainState, check_finite, read_checkpoint, save_checkpoint
from runner.checkpointer import Checkpointer
from runner.config import RunConfig, RuntimeConfig
from runner.cuda_graphs import CudaGraphs
from runner.distributed.collectives import FlagSync, ProcessGroup
from runner.engine import Batch
from runner.environment import environment, provenance, resolve_device
from runner.failures import describe_failure
from runner.meters import Meter, ResourceMonitor
from runner.progress import ProgressDisplay
from runner.remote_results import CheckpointUploader, RemoteResults, synchronized_run
from runner.results import FewShotRecord, Progress, RankUse, TrainResult, write_json
from runner.run_folders import RunFolder, check_training_content
from runner.setup import Setup, changed_file, set_up
from runner.step import AsyncLosses, TrainStep
from runner.stop_signals import Interrupted, StopRequest
from runner.threads import fitting_threads
from runner.tracking.background import exporter_for
from runner.validate import Callbacks, Validator
from shards.device.stream import DeviceTrainStream
from shards.rng import generator
from shards.transfer import to_device, upload

WARMUP_STEPS = 5
PHASES = ("load", "compile", "data", "forward", "backward", "optimizer", "checkpoint", "tracking")
UNTIMED_PHASES = ("load", "compile", "tracking", "validation")
"""Phases that are not part of the training's seconds; only runs with callbacks have the last one."""


def train(
    config: RunConfig,
    runtime: RuntimeConfig,
    *,
    force: bool = False,
    group: ProcessGroup | None = None,
    until: int | None = None,
    callbacks: Callbacks | None = None,
) -> TrainResult | Progress:
    """Train `config` below `runtime.results` and return the content of `train.json`; all ranks of a group call this.

    A finished run is read, not repeated, unless `force` deletes it with its evaluations; an interrupted one continues
    from its last saved state, on a CPU with the same final bits as if it had never stopped.
    until: pause after this many epochs, if the training has more, and return the progress so far. A run that already
        has a state of that epoch or a later one is not trained.
    callbacks: do not change the training, and are not called for a run without epochs.
    Raises RunHeld when another process works on the run, UserError when data or weights have changed, a result cannot
    be written or the loss is not finite; `Interrupted` after SIGINT or SIGTERM.
    """
    if until is not None and until < 1:
        raise ValueError(f"until = {until}: a run pauses after one epoch or more")
    group = group or ProcessGroup()
    first = group.ranks.is_first
    folder = RunFolder(runtime.results / config.path)
    store = RemoteResults.from_runtime(runtime) if first else RemoteResults(None, runtime.results)
    if not force:
        store.pull_run(config.path)
        if finished := read_finished(config, runtime, folder, group):
            if first:
                folder.tidy()
                store.push_run(config.path)
            return finished
    with folder.locked() if first else nullcontext(), synchronized_run(store, config.path, resumes=not force):
        if not force:
            # Another process may have finished the run while this one waited for the lock.
            if finished := read_finished(config, runtime, folder, group):
                return finished
            if until and (paused := _read_paused(config, folder, until, group, callbacks)):
                return paused
        with StopRequest(callbacks.stop_signal if callbacks else None) as stop:
            try:
                result = _train(config, runtime, folder, store, stop, group, until, callbacks, force=force)
            finally:
                if first and folder.config_file.exists():
                    exporter_for(runtime).post(config.path)
            stop.check(f"{result.status} {config.path}")
    return result


def read_finished(
    config: RunConfig, runtime: RuntimeConfig, folder: RunFolder, group: ProcessGroup
) -> TrainResult | None:
    """Read the result of a finished run. Raises UserError if it is of other settings, data or files than now."""
    result = folder.train() if group.ranks.is_first else None
    if result is not None:
        check_training_content(config, result, runtime.data)
        if why := result.changed_code(config):
            raise UserError(why)
        if option := changed_file(config, result.files):
            named = config.options[option]
            raise UserError(
                f"{config.path} was trained on another content of {option} = {named}: restore it, give the new file "
                "another name, or train again with --force"
            )
        read_checkpoint(folder.checkpoint_file, result.checkpoint_sha256)
    return group.broadcast_object(result)


def _read_paused(
    config: RunConfig, folder: RunFolder, until: int, group: ProcessGroup, callbacks: Callbacks | None
) -> Progress | None:
    """Read the progress of a run that has a state of epoch `until` or later, without loading it; None at its end."""
    progress = folder.progress() if group.ranks.is_first and until < config.recipe.epochs else None
    if progress is not None:
        epochs = len(progress.epochs)
        is_of_this_run = progress.config_hash == config.hash and progress.status != "failed"
        # The last epoch of the state can still be validated, so load the state if one of its counts is missing.
        lacks_counts = epochs == until and callbacks and callbacks.lacks_counts(epochs - 1, folder.validation())
        if epochs < until or not is_of_this_run or not any(folder.state.glob("step-*")) or lacks_counts:
            progress = None
        else:
            progress = progress.model_copy(update={"status": "paused"})
            write_json(folder.progress_file, progress)
    return group.broadcast_object(progress)


def _train(
    config: RunConfig,
    runtime: RuntimeConfig,
    folder: RunFolder,
    store: RemoteResults,
    stop: StopRequest,
    group: ProcessGroup,
    until: int | None,
    callbacks: Callbacks | None,
    *,
    force: bool,
) -> TrainResult | Progress:
    """Set up, train to the end or to epoch `until`, and write the result."""
    device = resolve_device(runtime.device)
    meter, monitor = Meter(device, WARMUP_STEPS, PHASES), ResourceMonitor(device)
    with (
        meter.phase("load", rated=False),
        stop.interruptible(f"stopped before the first step of {config.path}; repeat the command to resume"),
    ):
        setup = set_up(config, runtime, device, group)
    first, facts = group.ranks.is_first, environment(device)
    if force and first:
        # What is there stays where the set-up fails.
        store.delete_run(config.path)
        folder.clear()
    if first and not folder.config_file.exists():
        write_json(folder.config_file, config)
    state, validator = TrainState(), None
    if setup.engine is not None:
        checkpointer = Checkpointer(setup, folder, meter, CheckpointUploader(store, config.path), facts, group)
        epochs = min(until or config.recipe.epochs, config.recipe.epochs)
        with ExitStack() as stack, fitting_threads(setup.method.clip, config.recipe.batch_size // group.size):
            # Each stage of a training has its own engine.
            stack.callback(lambda: checkpointer.engine.close())
            validator = Validator(callbacks, checkpointer, runtime, stop)
            try:
                state = _fit(runtime, checkpointer, validator, monitor, epochs)
            except Interrupted:
                checkpointer.save_alone()
                raise
            except Exception as error:
                # The error of a callback ends a training whose state is saved already: it is interrupted.
                if first and not validator.callback_failed:
                    _record_failure(folder, error)
                raise
            if state.epoch < config.recipe.epochs:
                return checkpointer.finish("paused")
        if checkpointer.average:
            # Again, because a run that resumes after its last epoch has restored the sums but perhaps other weights.
            checkpointer.average.apply()
    check_finite(setup.method.state_dict(), f"after step {state.step}")
    meter.settle()
    rate = meter.images_per_second()
    own = RankUse(
        host=platform.node(),
        device=str(meter.device),
        images_per_second=rate and rate / group.size,
        data_share=meter.own_seconds("data") / (meter.own_seconds() or 1.0),
        peak_memory_bytes=monitor.peak_memory(),
    )
    ranks = group.all_gather_object(own)
    result = group.call_on_first(lambda: _write_result(folder, setup, state, meter, monitor, facts, ranks))
    if validator is not None:
        validator.notify(finished=True)
    return result


def _record_failure(folder: RunFolder, error: Exception) -> None:
    """Record in the progress that the training has failed, and why, unless that cannot be written."""
    with suppress(UserError, OSError):
        if progress := folder.progress():
            changes = {"status": "failed", "reason": describe_failure(error)}
            write_json(folder.progress_file, progress.model_copy(update=changes))


def _fit(
    runtime: RuntimeConfig, checkpointer: Checkpointer, validator: Validator, monitor: ResourceMonitor, epochs: int
) -> TrainState:
    """Run the training loop for `epochs` epochs; it can start anywhere, as draws are seeded by epoch, step or image."""
    config, setup, stop = checkpointer.config, checkpointer.setup, validator.stop
    recipe, method, schedule = config.recipe, setup.method, setup.schedule
    meter, group, first = checkpointer.meter, checkpointer.group, checkpointer.group.ranks.is_first
    assert schedule is not None
    device = method.clip.device
    state = checkpointer.restore()
    validator.resume()
    graphs = CudaGraphs(device) if setup.acceleration.graphs and runtime.engine == "ddp" else None
    step = TrainStep(checkpointer.engine, meter, graphs)
    losses, flag_sync = AsyncLosses(device), FlagSync(group)
    save_requested = False

    def count_all_steps() -> None:
        """Wait for all losses on the device, so that the state has the same step as the weights."""
        for terms in losses.take(everything=True):
            _count_step(checkpointer, schedule.images(state.step), step.names, terms)

    with ProgressDisplay(config.path, setup.steps, done=state.step, quiet=runtime.quiet or not first) as display:
        if state.resumed:
            display.print(f"going on with {config.path} from step {state.step} of {setup.steps}")
        for epoch in range(state.epoch, epochs):
            batches = schedule.batches(epoch, start_step=state.step_in_epoch)
            on_device = isinstance(schedule.stream, DeviceTrainStream)
            moved = stop.iterate(
                batches if on_device else to_device(batches, device), config.path, together=group.size > 1
            )
            for images, labels in meter.iterate("data", moved):
                # `state.step` counts steps whose losses have arrived; `len(losses)` counts the steps after them.
                number = state.step + len(losses)
                if (stage := schedule.stage(number)) != state.stage:
                    count_all_steps()
                    checkpointer.begin_stage(stage)
                    # Also new because a CUDA graph replays the work of one stage.
                    step = TrainStep(checkpointer.engine, meter, graphs)
                rates = schedule.rates(number, epoch)
                checkpointer.engine.set_rate(*rates)
                noise = method.draw(generator(config.seed, "noise", number))
                batch = Batch(images, labels, tuple(upload(each, device) for each in noise))
                if step.needs_capture:
                    with meter.phase("compile", rated=False):
                        step.capture(batch)
                losses.send(step(batch))
                meter.step(schedule.images(number))
                monitor.sample()
                for terms in losses.take():
                    loss = _count_step(checkpointer, schedule.images(state.step), step.names, terms)
                    display.update(state.step, epoch=f"{epoch + 1}/{recipe.epochs}", loss=loss, lr=rates[0])
                # The flags are those that all ranks sent at the step before, so all save or stop at the same step.
                save_now = first and not save_requested and checkpointer.is_due(runtime.checkpoint_seconds)
                agreed = flag_sync.exchange(save=save_now, signum=stop.signum)
                save_requested = (save_requested or save_now) and not agreed.save
                if agreed.save or agreed.signum:
                    count_all_steps()
                    if agreed.signum:
                        checkpointer.stop(agreed.signum)
                    checkpointer.save()
            count_all_steps()
            if group.size == 1 and (signum := stop.signum):
                checkpointer.stop(signum)
            meter.settle()
            if average := checkpointer.average:
                average.add(epoch)
                if epoch == recipe.epochs - 1:
                    average.apply()
            last_rate = schedule.rates(schedule.first_step(epoch + 1) - 1, epoch)[0]
            state.close_epoch(last_rate, meter.step_seconds)
            if skipped := state.epochs[-1].skipped:
                steps = schedule.first_step(epoch + 1) - schedule.first_step(epoch)
                display.print(
                    f"{config.path}: fp16 gradients overflowed in {skipped} of {steps} steps of epoch {epoch + 1}, "
                    f"which changed nothing; the loss scale is {checkpointer.engine.scaler.get_scale():g} now"
                )
            validator.validate()
            if group.broadcast_object(first and checkpointer.is_due(runtime.checkpoint_seconds, epoch_end=True)):
                checkpointer.save()
            if first:
                exporter_for(runtime).post(config.path)
            # After the last epoch the callback waits until the result is written.
            if epoch < recipe.epochs - 1:
                validator.notify()
        flag_sync.wait()
    return state


def _count_step(checkpointer: Checkpointer, images: int, names: Sequence[str], terms: Sequence[float]) -> float:
    """Add the next step over `images` to the state, from what a `TrainStep` returned; returns the loss."""
    *each, loss, skipped = terms
    values, state, config = dict(zip(names, each, strict=True)), checkpointer.state, checkpointer.config
    if not math.isfinite(loss):
        checkpointer.write_progress("failed")
        shown = ", ".join(f"{name} = {value:g}" for name, value in values.items())
        saved = checkpointer.saved_at
        start = f"goes on after step {saved[0]}" if saved else "starts over"
        raise UserError(
            f"{config.path}: the loss of step {state.step + 1} of {checkpointer.steps} "
            f"(epoch {state.epoch + 1}) is not finite: {shown}; the same command {start} and fails again: "
            f"train another run with {config.stability_hint}"
        )
    state.count(images, values, bool(skipped))
    return loss


def _write_result(
    folder: RunFolder,
    setup: Setup,
    state: TrainState,
    meter: Meter,
    monitor: ResourceMonitor,
    environment: dict[str, Any],
    ranks: list[RankUse],
) -> TrainResult:
    """Write the checkpoint, then `train.json`, which marks the run as finished."""
    config, few = setup.card.config, setup.fewshot
    few_shot = (
        None
        if few is None
        else FewShotRecord(shots=config.shots, seed=config.seed, digest=few.digest, picks=few.train.paths)
    )
    result = TrainResult(
        config_hash=config.hash,
        steps=state.step,
        images=state.images,
        epochs=state.epochs,
        seconds=max(0.0, meter.seconds - sum(meter.phases.get(name, 0.0) for name in UNTIMED_PHASES)),
        images_per_second=meter.images_per_second(),
        images_per_second_model=meter.images_per_second("forward", "backward", "optimizer"),
        warmup_steps=meter.warmup_steps,
        phases=meter.phases_with_other(),
        peak_memory_bytes=monitor.peak_memory(),
        use=monitor.use(),
        trainable_parameters=sum(parameter.numel() for parameter in setup.method.parameters()),
        statistics=setup.method.statistics() if state.step else {},
        fewshot=few_shot,
        manifest_digest=setup.card.manifest_digest,
        checkpoint_sha256=save_checkpoint(folder.checkpoint_file, setup.method, setup.card),
        backbone_digest=setup.card.backbone_digest,
        **provenance(environment),
        resumed=state.resumed,
        ranks=ranks if len(ranks) > 1 else [],
        files=dict(setup.files),
        method_source=setup.method_source,
    )
    write_json(folder.train_file, result)
    folder.forget_progress()
    return result
