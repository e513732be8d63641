"""Training of one run: a plain loop that can be killed anywhere and goes on with the same bits."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import torch

from procap.errors import UserError
from procap.recipe import learning_rate
from runner.assemble import Setup, autocast, check_content, set_up
from runner.checkpoint import TrainState, check_finite, read_prompts, save_prompts
from runner.config import RunConfig, Workplace
from runner.environment import environment, resolve_device
from runner.journal import Journal
from runner.meters import Machine, Meter
from runner.progress import ProgressDisplay
from runner.results import FewShotRecord, RunFolder, TrainResult, write_json
from runner.signals import StopRequest
from runner.track import Tracker, tracker_for
from shards.streams import generator

WARMUP_STEPS = 5
PHASES = ("load", "data", "forward", "backward", "optimizer", "checkpoint", "tracking")


def train(config: RunConfig, place: Workplace, *, force: bool = False) -> TrainResult:
    """Train `config` below `place.results` and give what `train.json` says.

    A finished run is read, not repeated, unless `force` forgets it with its evaluations; an interrupted one goes on
    from its last saved state, on a CPU with the same final bits as if it had never stopped.
    Raises UserError when the run is held by another process, when data or weights are not those it began with or was
    finished with, when a result cannot be written, and when the loss is not finite; `Interrupted` after SIGINT or
    SIGTERM.
    """
    folder = RunFolder(place.results / config.path)
    if not force and (done := _finished(folder, config, place)):
        folder.tidy()
        return done
    with folder.locked():
        if force:
            folder.clear()
        elif done := _finished(folder, config, place):
            return done
        with StopRequest() as stop:
            result = _train(config, place, folder, stop)
            stop.check(f"finished {config.path}")
    return result


def _finished(folder: RunFolder, config: RunConfig, place: Workplace) -> TrainResult | None:
    done = folder.train()
    if done is not None:
        if done.config_hash != config.hash:
            raise UserError(f"{folder.train_file} is of run {done.config_hash}, not {config.hash}; repeat with --force")
        check_content(f"{config.path} was trained", config.dataset, done.manifest_digest, place.data, "train")
        read_prompts(folder.checkpoint_file, done.checkpoint_sha256)
    return done


def _train(config: RunConfig, place: Workplace, folder: RunFolder, stop: StopRequest) -> TrainResult:
    device = resolve_device(place.device)
    meter, machine = Meter(device, WARMUP_STEPS, PHASES), Machine(device)
    with meter.phase("load", rated=False):
        setup = set_up(config, place.data, device, place.workers)
    if not folder.config_file.exists():
        write_json(folder.config_file, config)
    where = environment(device)
    with closing(tracker_for(folder, place)) as tracker:
        state = TrainState()
        if setup.stream is not None:
            steps = config.recipe.epochs * setup.stream.steps_per_epoch
            journal = Journal(config, folder, setup, meter, steps, where)
            state = _learn(config, place, journal, machine, stop, tracker)
        return _finish(config, folder, setup, state, meter, machine, where)


def _learn(
    config: RunConfig, place: Workplace, journal: Journal, machine: Machine, stop: StopRequest, tracker: Tracker
) -> TrainState:
    """The loop. Every random draw is named by epoch, step or image, so that where it is entered changes nothing."""
    recipe, method, stream, meter = config.recipe, journal.setup.method, journal.setup.stream, journal.meter
    assert stream is not None
    device = method.clip.device
    optimizer = journal.optimizer
    state = journal.restore()
    with ProgressDisplay(config.path, journal.steps, done=state.step, quiet=place.quiet) as display:
        if state.resumed:
            display.say(f"going on with {config.path} from step {state.step} of {journal.steps}")
        if recipe.warmup != "none" and recipe.epochs <= recipe.warmup_epochs:
            highest = max(learning_rate(recipe, epoch) for epoch in range(recipe.epochs))
            display.say(
                f"{config.path} hardly learns: every epoch is a warm-up epoch at a rate of {highest:g} or less instead "
                f"of {recipe.lr:g}; give more epochs than {recipe.warmup_epochs}"
            )
        for epoch in range(state.epoch, recipe.epochs):
            lr = learning_rate(recipe, epoch)
            for group in optimizer.param_groups:
                group["lr"] = lr
            for images, labels in meter.each("data", stream.epoch(epoch, start_step=state.step_in_epoch)):
                with meter.phase("forward"), autocast(config, device):
                    noise = tuple(t.to(device) for t in method.draw(generator(config.seed, "noise", state.step)))
                    terms = method.loss(images.to(device), labels.to(device), noise)
                    loss = torch.stack(list(terms.values())).sum()
                    values = journal.finite(terms, loss)
                with meter.phase("backward"):
                    optimizer.zero_grad(set_to_none=True)
                    loss.backward()
                with meter.phase("optimizer"):
                    if recipe.grad_clip is not None:
                        torch.nn.utils.clip_grad_norm_(method.parameters(), recipe.grad_clip)
                    optimizer.step()
                meter.step(len(images))
                machine.sample()
                state.count(len(images), values)
                display.update(state.step, epoch=f"{epoch + 1}/{recipe.epochs}", loss=sum(values.values()), lr=lr)
                if stop.signum is not None:
                    journal.save("interrupted")
                elif journal.due(place.checkpoint_seconds):
                    journal.save()
                stop.check(f"stopped {config.path} at step {state.step} of {journal.steps}; repeat to go on")
            meter.settle()
            state.close_epoch(lr, meter.step_seconds)
            if journal.due(place.checkpoint_seconds, epoch_end=True):
                journal.save()
            with meter.phase("tracking", rated=False):
                tracker.sync()
    return state


def _finish(
    config: RunConfig,
    folder: RunFolder,
    setup: Setup,
    state: TrainState,
    meter: Meter,
    machine: Machine,
    where: dict[str, Any],
) -> TrainResult:
    """Write the checkpoint, then `train.json`, which makes the run a finished one."""
    check_finite(setup.method.state_dict(), f"after step {state.step}")
    sha256 = save_prompts(folder.checkpoint_file, setup.method, setup.card)
    meter.settle()
    few = setup.fewshot
    picks = (
        None
        if few is None
        else FewShotRecord(
            shots=config.shots, seed=few.seed, source=few.source, digest=few.digest, picks=list(few.picks)
        )
    )
    result = TrainResult(
        config_hash=config.hash,
        steps=state.step,
        images=state.images,
        epochs=state.epochs,
        seconds=meter.seconds - meter.phases["load"] - meter.phases["tracking"],
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
    )
    write_json(folder.train_file, result)
    folder.forget_progress()
    return result
