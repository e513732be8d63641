"""Training of one run: a plain loop that can be killed anywhere and goes on with the same bits."""

from __future__ import annotations

import platform
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Any, overload

from procap.errors import UserError
from procap.recipe import learning_rate
from runner.checkpoint import TrainState, check_finite, read_prompts, save_prompts
from runner.checkpoint_upload import delivered
from runner.checkpointer import Checkpointer
from runner.config import RunConfig, RuntimeConfig
from runner.cuda_graphs import CudaGraphs
from runner.distributed.collectives import ProcessGroup
from runner.distributed.flag_sync import FlagSync, Status
from runner.distributed.ranks import ALONE
from runner.engine import Batch
from runner.environment import environment, resolve_device
from runner.meters import Machine, Meter
from runner.progress import ProgressDisplay
from runner.results import FewShotRecord, Progress, RankUse, RunFolder, TrainResult, write_json
from runner.results_store import ResultsStore
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
    place: RuntimeConfig,
    *,
    force: bool = False,
    crew: ProcessGroup | None = None,
    until: None = None,
    watch: Watch | None = None,
) -> TrainResult: ...
@overload
def train(
    config: RunConfig,
    place: RuntimeConfig,
    *,
    force: bool = False,
    crew: ProcessGroup | None = None,
    until: int | None,
    watch: Watch | None = None,
) -> TrainResult | Progress: ...
def train(
    config: RunConfig,
    place: RuntimeConfig,
    *,
    force: bool = False,
    crew: ProcessGroup | None = None,
    until: int | None = None,
    watch: Watch | None = None,
) -> TrainResult | Progress:
    """Train `config` below `place.results` and give what `train.json` says.

    A finished run is read, not repeated, unless `force` forgets it with its evaluations; an interrupted one goes on
    from its last saved state, on a CPU with the same final bits as if it had never stopped.
    until: pause after so many epochs with a saved state, where that is before the last one, and give the progress so
        far. A run that is there already is left as it is.
    watch: who looks on; changes nothing of the training. A run without epochs has nothing to be seen.
    Of a crew every process calls this; the first one reads and writes the results, and alone needs their folder.
    Raises RunHeld when another process works on the run, UserError when data or weights are not those it began with or
    was finished with, when a result cannot be written, and when the loss is not finite; `Interrupted` after SIGINT or
    SIGTERM, which are held back in the main thread only.
    """
    if until is not None and until < 1:
        raise ValueError(f"until = {until}: a run pauses after one epoch or more")
    crew = crew or ProcessGroup(ALONE)
    first = crew.ranks.first
    folder = RunFolder(place.results / config.path)
    store = ResultsStore.of(place) if first else ResultsStore(None, place.results)
    if not force:
        store.pull(config.path)
    if done := _known(config, place, folder, crew, force):
        if first:
            folder.tidy()
            store.push(config.path)
        return done
    with folder.locked() if first else nullcontext(), delivered(store, config.path, anew=force):
        if force:
            if first:
                folder.clear()
        elif done := _known(config, place, folder, crew, force):
            return done
        elif until and (paused := _reached(config, folder, until, crew, watch)):
            return paused
        with StopRequest() as stop:
            result = _train(config, place, folder, stop, crew, until, watch)
            stop.check(f"{result.status} {config.path}")
    return result


def _known(
    config: RunConfig, place: RuntimeConfig, folder: RunFolder, crew: ProcessGroup, force: bool
) -> TrainResult | None:
    """The finished training, as the first process of the crew finds it."""
    return crew.share_record(_finished(folder, config, place) if crew.ranks.first and not force else None, TrainResult)


def _finished(folder: RunFolder, config: RunConfig, place: RuntimeConfig) -> TrainResult | None:
    done = folder.train()
    if done is not None:
        if done.config_hash != config.hash:
            raise UserError(f"{folder.train_file} is of run {done.config_hash}, not {config.hash}; repeat with --force")
        check_content(f"{config.path} was trained", config.dataset, done.manifest_digest, place.data, "train")
        read_prompts(folder.checkpoint_file, done.checkpoint_sha256)
    return done


def _reached(
    config: RunConfig, folder: RunFolder, until: int, crew: ProcessGroup, watch: Watch | None
) -> Progress | None:
    """The progress of a run that has a state of epoch `until` or a later one, found without loading anything."""
    said = folder.progress() if crew.ranks.first else None
    epochs = len(said.epochs) if said else 0
    if said and (said.config_hash != config.hash or said.status == "failed" or not any(folder.state.glob("step-*"))):
        said = None
    if said and epochs <= until and watch and (validation := watch.validation):
        # Of the state's own epoch what was not counted still can be.
        said = None if validation.missing(epochs - 1, until - 1, folder.validation()) else said
    if said and epochs >= until:
        said = said.model_copy(update={"status": "paused"})
        write_json(folder.progress_file, said)
    return crew.share_record(said if epochs >= until else None, Progress)


def _train(
    config: RunConfig,
    place: RuntimeConfig,
    folder: RunFolder,
    stop: StopRequest,
    crew: ProcessGroup,
    until: int | None,
    watch: Watch | None,
) -> TrainResult | Progress:
    device = resolve_device(place.device)
    meter, machine = Meter(device, WARMUP_STEPS, PHASES), Machine(device)
    with meter.phase("load", rated=False):
        setup = set_up(config, place, device, crew)
    first = crew.ranks.first
    if first and not folder.config_file.exists():
        write_json(folder.config_file, config)
    where = environment(device)
    with closing(tracker_for(folder, place if first else replace(place, tracking_uri="off"))) as tracker:
        state, watcher = TrainState(), None
        if setup.stream is not None:
            steps = config.recipe.epochs * setup.stream.steps_per_epoch
            journal = Checkpointer(config, place, folder, setup, meter, steps, where, crew)
            images = config.recipe.batch_size // crew.ranks.size
            end = min(until or config.recipe.epochs, config.recipe.epochs)
            watcher = Watcher(watch, journal, place, stop, last=end - 1)
            with closing(journal.engine), fitting_threads(setup.method.clip, images):
                state = _learn(config, place, journal, machine, stop, tracker, watcher)
                if state.epoch < config.recipe.epochs:
                    return journal.leave("paused")
        result = _finish(config, place, folder, setup, state, meter, machine, where, crew)
    if watcher is not None:
        watcher.tell(finished=True)
    return result


def _learn(
    config: RunConfig,
    place: RuntimeConfig,
    journal: Checkpointer,
    machine: Machine,
    stop: StopRequest,
    tracker: Tracker,
    watcher: Watcher,
) -> TrainState:
    """The loop. Every random draw is named by epoch, step or image, so that where it is entered changes nothing."""
    setup, meter, recipe, crew = journal.setup, journal.meter, config.recipe, journal.crew
    method, stream, first = setup.method, setup.stream, crew.ranks.first
    assert stream is not None
    device = method.clip.device
    state = journal.restore()
    watcher.go_on()
    crew.restart_seconds()
    recorder = CudaGraphs(device) if setup.ways.graphs and place.engine == "ddp" else None
    step, arrivals, agreement = TrainStep(journal.engine, meter, recorder), AsyncLosses(device), FlagSync(crew)
    images_per_step = min(recipe.batch_size, len(stream.split))
    asked = False

    def settle() -> None:
        """Book every step that was taken; the state is then that of the weights."""
        for terms in arrivals.take(everything=True):
            journal.count(images_per_step, step.names, terms)

    with ProgressDisplay(config.path, journal.steps, done=state.step, quiet=place.quiet or not first) as display:
        if state.resumed:
            display.say(f"going on with {config.path} from step {state.step} of {journal.steps}")
        if recipe.warmup != "none" and recipe.epochs <= recipe.warmup_epochs:
            highest = max(learning_rate(recipe, epoch) for epoch in range(recipe.epochs))
            display.say(
                f"{config.path} hardly learns: every epoch is a warm-up epoch at a rate of {highest:g} or less instead "
                f"of {recipe.lr:g}; give more epochs than {recipe.warmup_epochs}"
            )
        for epoch in range(state.epoch, watcher.last + 1):
            lr = learning_rate(recipe, epoch)
            journal.engine.set_rate(lr)
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
                    loss = journal.count(images_per_step, step.names, terms)
                    display.update(state.step, epoch=f"{epoch + 1}/{recipe.epochs}", loss=loss, lr=lr)
                wish = Status(
                    save=first and not asked and journal.due(place.checkpoint_seconds), signum=stop.signum or 0
                )
                decided = agreement.exchange(wish)
                asked = (asked or wish.save) and not decided.save
                if decided.save or decided.signum:
                    settle()
                    if decided.signum:
                        journal.stop(decided.signum)
                    journal.save()
            settle()
            meter.settle()
            state.close_epoch(lr, meter.step_seconds)
            watcher.count()
            if crew.share(first and journal.due(place.checkpoint_seconds, epoch_end=True)):
                journal.save()
            with meter.phase("tracking", rated=False):
                tracker.sync()
            if epoch < recipe.epochs - 1:
                watcher.tell()
        agreement.settle()
    return state


def _finish(
    config: RunConfig,
    place: RuntimeConfig,
    folder: RunFolder,
    setup: Setup,
    state: TrainState,
    meter: Meter,
    machine: Machine,
    where: dict[str, Any],
    crew: ProcessGroup,
) -> TrainResult:
    """Write the checkpoint, then `train.json`, which makes the run a finished one; of a crew its first process does."""
    check_finite(setup.method.state_dict(), f"after step {state.step}")
    meter.settle()
    own = _use(meter, machine, crew, seen=place.engine == "ddp")
    ranks = [RankUse.model_validate(use) for use in crew.collect(own.model_dump(mode="json"))]
    result = _record(config, folder, setup, state, meter, machine, where, ranks) if crew.ranks.first else None
    result = crew.share_record(result, TrainResult)
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


def _use(meter: Meter, machine: Machine, crew: ProcessGroup, *, seen: bool) -> RankUse:
    """seen: whether the crew was there when gradients were sent."""
    seconds, rate = meter.own_seconds() or 1.0, meter.images_per_second()
    return RankUse(
        host=platform.node(),
        device=str(meter.device),
        images_per_second=rate and rate / crew.ranks.size,
        data_share=meter.own_seconds("data") / seconds,
        communication_share=crew.seconds / seconds if seen else None,
        peak_memory_bytes=machine.peak_memory(),
    )
