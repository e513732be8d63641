"""Training of one run: a plain loop that can be killed anywhere and goes on with the same bits."""

from __future__ import annotations

import platform
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Any, overload

from procap.errors import UserError
from procap.recipe import learning_rate
from runner.checkpoint import TrainState, check_finite, read_prompts, save_prompts
from runner.checkpointer import Checkpointer
from runner.config import RunConfig, RuntimeConfig
from runner.cuda_graphs import CudaGraphs
from runner.distributed.collectives import ProcessGroup
from runner.distributed.flag_sync import Flags, FlagSync
from runner.distributed.ranks import ALONE
from runner.engine import Batch
from runner.environment import environment, resolve_device
from runner.meters import Machine, Meter
from runner.progress import ProgressDisplay
from runner.remote_results import RemoteResults, synchronized_run
from runner.results import FewShotRecord, Progress, RankUse, RunFolder, TrainResult, write_json
from runner.setup import Setup, check_content, set_up
from runner.step import AsyncLosses, TrainStep
from runner.stop_signals import StopRequest
from runner.threads import fitting_threads
from runner.tracking.tracker import Tracker, tracker_for
from runner.validate import Watch, Watcher
from shards.device.stream import DeviceTrainStream
from shards.rng import generator
from shards.transfer import to_device, upload

WARMUP_STEPS = 5
PHASES = ("load", "compile", "data", "forward", "backward", "optimizer", "checkpoint", "tracking")
STARTING = ("load", "compile", "tracking")
APART = (*STARTING, "validation")
"""Phases that are stated apart from the seconds of the training; only a run that is watched has the last one."""


@overload
def train(
    config: RunConfig,
    runtime: RuntimeConfig,
    *,
    force: bool = False,
    group: ProcessGroup | None = None,
    until: None = None,
    watch: Watch | None = None,
) -> TrainResult: ...
@overload
def train(
    config: RunConfig,
    runtime: RuntimeConfig,
    *,
    force: bool = False,
    group: ProcessGroup | None = None,
    until: int | None,
    watch: Watch | None = None,
) -> TrainResult | Progress: ...
def train(
    config: RunConfig,
    runtime: RuntimeConfig,
    *,
    force: bool = False,
    group: ProcessGroup | None = None,
    until: int | None = None,
    watch: Watch | None = None,
) -> TrainResult | Progress:
    """Train `config` below `runtime.results` and give what `train.json` says.

    A finished run is read, not repeated, unless `force` forgets it with its evaluations; an interrupted one goes on
    from its last saved state, on a CPU with the same final bits as if it had never stopped.
    until: pause after so many epochs with a saved state, where that is before the last one, and give the progress so
        far. A run that is there already is left as it is.
    watch: who looks on; changes nothing of the training. A run without epochs has nothing to be seen.
    Of a group every process calls this; the first one reads and writes the results, and alone needs their folder.
    Raises RunHeld when another process works on the run, UserError when data or weights are not those it began with or
    was finished with, when a result cannot be written, and when the loss is not finite; `Interrupted` after SIGINT or
    SIGTERM, which are held back in the main thread only.
    """
    if until is not None and until < 1:
        raise ValueError(f"until = {until}: a run pauses after one epoch or more")
    group = group or ProcessGroup(ALONE)
    first = group.ranks.first
    folder = RunFolder(runtime.results / config.path)
    store = RemoteResults.of(runtime) if first else RemoteResults(None, runtime.results)
    if not force:
        store.pull_run(config.path)
    if done := _known(config, runtime, folder, group, force):
        if first:
            folder.tidy()
            store.push_run(config.path)
        return done
    with folder.locked() if first else nullcontext(), synchronized_run(store, config.path, anew=force):
        if force:
            if first:
                folder.clear()
        elif done := _known(config, runtime, folder, group, force):
            return done
        elif until and (paused := _reached(config, folder, until, group, watch)):
            return paused
        with StopRequest() as stop:
            result = _train(config, runtime, folder, stop, group, until, watch)
            stop.check(f"{result.status} {config.path}")
    return result


def _known(
    config: RunConfig, runtime: RuntimeConfig, folder: RunFolder, group: ProcessGroup, force: bool
) -> TrainResult | None:
    """The finished training, as the first process of the group finds it."""
    return group.broadcast_object(_finished(folder, config, runtime) if group.ranks.first and not force else None)


def _finished(folder: RunFolder, config: RunConfig, runtime: RuntimeConfig) -> TrainResult | None:
    done = folder.train()
    if done is not None:
        if done.config_hash != config.hash:
            raise UserError(f"{folder.train_file} is of run {done.config_hash}, not {config.hash}; repeat with --force")
        check_content(f"{config.path} was trained", config.dataset, done.manifest_digest, runtime.data, "train")
        read_prompts(folder.checkpoint_file, done.checkpoint_sha256)
    return done


def _reached(
    config: RunConfig, folder: RunFolder, until: int, group: ProcessGroup, watch: Watch | None
) -> Progress | None:
    """The progress of a run that has a state of epoch `until` or a later one, found without loading anything."""
    said = folder.progress() if group.ranks.first else None
    epochs = len(said.epochs) if said else 0
    if said and (said.config_hash != config.hash or said.status == "failed" or not any(folder.state.glob("step-*"))):
        said = None
    if said and epochs <= until and watch and (validation := watch.validation):
        # Of the state's own epoch what was not counted still can be.
        said = None if validation.missing(epochs - 1, until - 1, folder.validation()) else said
    if said and epochs >= until:
        said = said.model_copy(update={"status": "paused"})
        write_json(folder.progress_file, said)
    return group.broadcast_object(said if epochs >= until else None)


def _train(
    config: RunConfig,
    runtime: RuntimeConfig,
    folder: RunFolder,
    stop: StopRequest,
    group: ProcessGroup,
    until: int | None,
    watch: Watch | None,
) -> TrainResult | Progress:
    device = resolve_device(runtime.device)
    meter, machine = Meter(device, WARMUP_STEPS, PHASES), Machine(device)
    with meter.phase("load", rated=False):
        setup = set_up(config, runtime, device, group)
    first = group.ranks.first
    if first and not folder.config_file.exists():
        write_json(folder.config_file, config)
    where = environment(device)
    with closing(tracker_for(folder, runtime if first else replace(runtime, tracking_uri="off"))) as tracker:
        state, watcher = TrainState(), None
        if setup.stream is not None:
            steps = config.recipe.epochs * setup.stream.steps_per_epoch
            checkpointer = Checkpointer(config, runtime, folder, setup, meter, steps, where, group)
            images = config.recipe.batch_size // group.ranks.size
            end = min(until or config.recipe.epochs, config.recipe.epochs)
            watcher = Watcher(watch, checkpointer, runtime, stop, last=end - 1)
            with closing(checkpointer.engine), fitting_threads(setup.method.clip, images):
                state = _learn(config, runtime, checkpointer, machine, stop, tracker, watcher)
                if state.epoch < config.recipe.epochs:
                    return checkpointer.leave("paused")
        result = _finish(config, runtime, folder, setup, state, meter, machine, where, group)
    if watcher is not None:
        watcher.tell(finished=True)
    return result


def _learn(
    config: RunConfig,
    runtime: RuntimeConfig,
    checkpointer: Checkpointer,
    machine: Machine,
    stop: StopRequest,
    tracker: Tracker,
    watcher: Watcher,
) -> TrainState:
    """The loop. Every random draw is named by epoch, step or image, so that where it is entered changes nothing."""
    setup, meter, recipe, group = checkpointer.setup, checkpointer.meter, config.recipe, checkpointer.group
    method, stream, first = setup.method, setup.stream, group.ranks.first
    assert stream is not None
    device = method.clip.device
    state = checkpointer.restore()
    watcher.go_on()
    group.reset_seconds()
    recorder = CudaGraphs(device) if setup.ways.graphs and runtime.engine == "ddp" else None
    step, arrivals, flag_sync = TrainStep(checkpointer.engine, meter, recorder), AsyncLosses(device), FlagSync(group)
    images_per_step = min(recipe.batch_size, len(stream.split))
    asked = False

    def settle() -> None:
        """Book every step that was taken; the state is then that of the weights."""
        for terms in arrivals.take(everything=True):
            checkpointer.count(images_per_step, step.names, terms)

    with ProgressDisplay(config.path, checkpointer.steps, done=state.step, quiet=runtime.quiet or not first) as display:
        if state.resumed:
            display.say(f"going on with {config.path} from step {state.step} of {checkpointer.steps}")
        if recipe.warmup != "none" and recipe.epochs <= recipe.warmup_epochs:
            highest = max(learning_rate(recipe, epoch) for epoch in range(recipe.epochs))
            display.say(
                f"{config.path} hardly learns: every epoch is a warm-up epoch at a rate of {highest:g} or less instead "
                f"of {recipe.lr:g}; give more epochs than {recipe.warmup_epochs}"
            )
        for epoch in range(state.epoch, watcher.last + 1):
            lr = learning_rate(recipe, epoch)
            checkpointer.engine.set_rate(lr)
            batches = stream.epoch(epoch, start_step=state.step_in_epoch)
            augmented = isinstance(stream, DeviceTrainStream)
            for images, labels in meter.each("data", batches if augmented else to_device(batches, device)):
                drawn = method.draw(generator(config.seed, "noise", state.step + len(arrivals)))
                batch = Batch(images, labels, tuple(upload(noise, device) for noise in drawn))
                if step.unprepared:
                    with meter.phase("compile", rated=False):
                        step.prepare(batch)
                arrivals.send(step(batch))
                meter.step(images_per_step)
                machine.sample()
                for terms in arrivals.take():
                    loss = checkpointer.count(images_per_step, step.names, terms)
                    display.update(state.step, epoch=f"{epoch + 1}/{recipe.epochs}", loss=loss, lr=lr)
                wish = Flags(
                    save=first and not asked and checkpointer.due(runtime.checkpoint_seconds), signum=stop.signum or 0
                )
                decided = flag_sync.exchange(wish)
                asked = (asked or wish.save) and not decided.save
                if decided.save or decided.signum:
                    settle()
                    if decided.signum:
                        checkpointer.stop(decided.signum)
                    checkpointer.save()
            settle()
            meter.settle()
            state.close_epoch(lr, meter.step_seconds)
            watcher.count()
            if group.broadcast_object(first and checkpointer.due(runtime.checkpoint_seconds, epoch_end=True)):
                checkpointer.save()
            with meter.phase("tracking", rated=False):
                tracker.sync()
            if epoch < recipe.epochs - 1:
                watcher.tell()
        flag_sync.wait()
    return state


def _finish(
    config: RunConfig,
    runtime: RuntimeConfig,
    folder: RunFolder,
    setup: Setup,
    state: TrainState,
    meter: Meter,
    machine: Machine,
    where: dict[str, Any],
    group: ProcessGroup,
) -> TrainResult:
    """Write the checkpoint, then `train.json`, which makes the run a finished one; rank 0 does."""
    check_finite(setup.method.state_dict(), f"after step {state.step}")
    meter.settle()
    own = _use(meter, machine, group, seen=runtime.engine == "ddp")
    ranks = [RankUse.model_validate(use) for use in group.all_gather_object(own.model_dump(mode="json"))]
    result = _record(config, folder, setup, state, meter, machine, where, ranks) if group.ranks.first else None
    result = group.broadcast_object(result)
    assert result is not None
    return result


def _record(
    config: RunConfig,
    folder: RunFolder,
    setup: Setup,
    state: TrainState,
    meter: Meter,
    machine: Machine,
    where: dict[str, Any],
    ranks: list[RankUse],
) -> TrainResult:
    sha256 = save_prompts(folder.checkpoint_file, setup.method, setup.card)
    few = setup.fewshot
    picks = (
        None
        if few is None
        else FewShotRecord(
            shots=config.shots, seed=few.seed, source=few.source, digest=few.digest, picks=few.train.paths
        )
    )
    result = TrainResult(
        config_hash=config.hash,
        steps=state.step,
        images=state.images,
        epochs=state.epochs,
        seconds=meter.seconds - sum(meter.phases.get(name, 0.0) for name in APART),
        images_per_second=meter.images_per_second(),
        images_per_second_model=meter.images_per_second("forward", "backward", "optimizer"),
        warmup_steps=meter.warmup_steps,
        phases=meter.with_other(),
        peak_memory_bytes=machine.peak_memory(),
        use=machine.use(),
        trainable_parameters=sum(parameter.numel() for parameter in setup.method.parameters()),
        fewshot=picks,
        manifest_digest=setup.card.manifest_digest,
        checkpoint_sha256=sha256,
        backbone_digest=setup.card.backbone_digest,
        environment=where,
        resumed=state.resumed,
        ranks=ranks if len(ranks) > 1 else [],
    )
    write_json(folder.train_file, result)
    folder.forget_progress()
    return result


def _use(meter: Meter, machine: Machine, group: ProcessGroup, *, seen: bool) -> RankUse:
    """seen: whether the group was there when gradients were sent."""
    seconds, rate = meter.own_seconds() or 1.0, meter.images_per_second()
    return RankUse(
        host=platform.node(),
        device=str(meter.device),
        images_per_second=rate and rate / group.ranks.size,
        data_share=meter.own_seconds("data") / seconds,
        communication_share=group.communication_seconds / seconds if seen else None,
        peak_memory_bytes=machine.peak_memory(),
    )
