"""Sweeps and runs as trials of Ray Tune, on one local Ray that the tests of this file share."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from statistics import fmean, stdev

import pytest
from command_line import plan_sweep
from local_server import LocalServer
from test_cluster_sweep import ASKED, GRID, PARAMS, make_paths, run, spec

from benchmarks.cli import main
from benchmarks.sweeps.outcome import sort_configurations
from cluster.distributed_trial import Rank
from cluster.executor import TrialWork
from cluster.launcher import Launcher, connect, launch
from cluster.ray_cluster import Capacity, Resources
from cluster.sweep_record import Configuration, SweepFolder
from cluster.trial import TrialReport
from cluster.tune_runner import make_callback, run_trials
from procap.errors import UsageError, UserError
from runner.config import Target
from runner.planning import plan_run
from runner.run_collection import read_collection
from runner.run_folders import RunFolder, find_runs
from shards.files import file_lock

RATES = (1e4, 1e3, 0.02)


TPE = ["--name", "tpe", "--search", "tpe", "--param", "lr=loguniform(1e-4,1e30)", "--trials", "7", *PARAMS]
TPE += ["--search-seed", "16"]
ASHA = ["--scheduler", "asha", "--grace-period", "1", "--reduction-factor", "2"]
FINISHED = [
    Configuration(values={"recipe.lr": lr, "options.ctx_init": "an_old_grey_dog"}, state="finished",
                  scores={f"x/seed1-{number:08x}": score}, epochs=1)
    for number, (lr, score) in enumerate([(0.002, 40.0), (0.5, 20.0)])
]  # fmt: skip
UNFINISHED = (*RATES, 1e30)


@pytest.fixture(scope="module")
def halved(local_ray, where, tmp_path_factory):
    """Results of a sweep with TPE and ASHA, and its exit code; leave them as they are.

    It continues one of seven configurations, of which two are finished and four have failed; one fails again.
    """
    results = tmp_path_factory.mktemp("halved")
    unfinished = [
        Configuration(values={"recipe.lr": lr, "options.ctx_init": "an_old_grey_dog"}, state="failed")
        for lr in UNFINISHED
    ]
    words = [*ASKED, *TPE, *ASHA, *where, "--results", str(results)]
    SweepFolder(results / "sweeps" / "tpe").save(plan_sweep(*words), [*FINISHED, *unfinished])
    return results, main(["sweep", *words])


@pytest.fixture(scope="module")
def searched(halved, where, tmp_path_factory):
    """Results with a finished grid of 3 configurations, of which `halved` trained a part; leave them as they are."""
    results = shutil.copytree(halved[0], tmp_path_factory.mktemp("searched") / "results")
    assert main(["sweep", *ASKED, *GRID, *where, "--results", str(results)]) == 0
    return results


def printed(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def configurations(results, name="grid"):
    """Return the recorded configurations of a sweep, the best first."""
    return sort_configurations(SweepFolder(results / "sweeps" / name).load().configurations)


def test_its_runs_are_those_of_procap_train(searched, few_digits, tiny_checkpoint):
    wanted = {
        plan_run(method="coop", dataset="digits", seed=seed, shots=2, backbone=str(tiny_checkpoint),
                 overrides={"epochs": 3, "lr": lr, "warmup": "none"}, options={"ctx_init": "an_old_grey_dog"}).path
        for lr in RATES for seed in (1, 2)
    }  # fmt: skip
    assert {run for configuration in configurations(searched) for run in configuration.runs} == wanted
    assert all(RunFolder(searched / run).read_training() for run in wanted)


def test_its_scores_are_the_counts_of_validation_images(searched):
    tried = configurations(searched)
    assert len(tried) == 3
    for configuration in tried:
        folders = [RunFolder(searched / run) for run in configuration.runs]
        results = [folder.read_evaluation(Target("digits", "base", "val")) for folder in folders]
        accuracies = [100 * result.correct / result.total for result in results if result]
        assert configuration.score == pytest.approx(fmean(accuracies)) and len(accuracies) == 2
        assert configuration.spread == pytest.approx(stdev(accuracies))
    scores = [configuration.score for configuration in tried]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.slow
def test_the_scores_are_the_same_where_no_test_image_exists(searched, where, few_digits, tmp_path):
    shutil.copytree(few_digits, tmp_path / "data")
    shutil.rmtree(tmp_path / "data" / "digits" / "test")
    half = ["--name", "grid", "--param", "lr=0.02", *PARAMS]
    blind = ["--data", str(tmp_path / "data"), "--results", str(tmp_path)]
    assert main(["sweep", *ASKED, *half, *where, *blind]) == 0
    expected = {configuration.runs: configuration.scores for configuration in configurations(searched)}
    [configuration] = configurations(tmp_path)
    assert configuration.scores == expected[configuration.runs]


def test_repeated_it_trains_nothing_and_prints_the_same(searched, where, capsys):
    files = {file: file.stat().st_mtime_ns for run in find_runs(searched) for file in run.path.rglob("*.json")}
    before = configurations(searched)
    assert main(["sweep", *ASKED, *GRID, *where, "--results", str(searched), "--json"]) == 0
    captured = capsys.readouterr()
    rows = json.loads(captured.out.splitlines()[-1])["configurations"]
    assert [row["score"] for row in rows] == [configuration.score for configuration in before]
    assert before == configurations(searched)
    assert "3 with a score already" in captured.err
    assert files == {file: file.stat().st_mtime_ns for file in files}


def test_force_deletes_its_runs_and_their_scores_first(searched, where, tmp_path, monkeypatch):
    results = shutil.copytree(searched, tmp_path / "results")
    monkeypatch.setattr("benchmarks.cli.sweep._execute", lambda *_: 0)
    again = ["sweep", *ASKED, *GRID, *where, "--results", str(results)]
    tried = {path for configuration in configurations(results) for path in configuration.runs}
    assert main([*again, "--force", "--dry-run"]) == main(again) == 0
    assert tried <= {run.path.relative_to(results).as_posix() for run in find_runs(results)}
    assert main([*again, "--force"]) == 0
    assert not tried & {run.path.relative_to(results).as_posix() for run in find_runs(results) if run.read_training()}
    assert not configurations(results)


def test_the_commands_at_its_end_train_the_best_and_test_it(searched, where, capsys):
    assert main(["sweep", *ASKED, *GRID, *where, "--results", str(searched), "--json"]) == 0
    document = printed(capsys)
    train, evaluate = (shlex.split(line)[1:] for line in document["commands"])
    best = document["best"]
    assert main([*train, "--tracking", "off", "--json"]) == 0
    assert {run["run"] for run in printed(capsys)["trained"]} == set(best["runs"])
    assert main([*evaluate, "--dry-run", "--json"]) == 0
    planned = printed(capsys)["runs"]
    assert {run["run"] for run in planned} == set(best["runs"])
    targets = {target for run in planned for target in run["targets"]}
    assert targets == {"digits:base:test", "digits:novel:test"}


def test_the_same_name_for_another_search_is_refused_and_more_of_the_same_is_not(searched, where, capsys):
    place = [*where, "--results", str(searched), "--dry-run"]
    other = ["--name", "grid", "--param", "lr=0.002,0.2", *PARAMS]
    assert main(["sweep", *ASKED, *other, *place]) == 2
    error = capsys.readouterr().err
    assert "has different settings: space was" in error and "another --name" in error and error.count("\n") == 1
    assert main(["sweep", *ASKED, *GRID, "--hours", "2", *place]) == 0


def test_a_sweep_that_another_process_carries_out_is_refused(searched, where, capsys):
    with file_lock(searched / "sweeps" / "grid" / ".lock"):
        assert main(["sweep", *ASKED, *GRID, *where, "--results", str(searched)]) == 1
    error = capsys.readouterr().err
    assert "held by another process (pid " in error and error.count("\n") == 1


def test_tpe_resumes_and_keeps_to_its_budget(halved):
    results, code = halved
    tried = SweepFolder(results / "sweeps" / "tpe").load().configurations
    assert code == 3 and len(tried) == 7 and tried[:2] == FINISHED
    assert [configuration.values["recipe.lr"] for configuration in tried[2:6]] == [*UNFINISHED]
    assert all(configuration.state != "unfinished" for configuration in tried)
    # The failure of the first seed ends its trial before the second.
    assert len(find_runs(results)) == 2 * 4 + 1


def mean_at(configuration, epoch, results):
    """The mean over its runs of what `validation.json` says of an epoch, 1-based."""
    accuracies = []
    for path in configuration.runs:
        [count] = [count for count in RunFolder(results / path).read_validation() if count.epoch == epoch - 1]
        assert count.target == "digits:base:val"
        accuracies.append(100 * count.correct / count.total)
    return fmean(accuracies)


def test_a_configuration_that_fails_leaves_the_others_alone(halved):
    results, _ = halved
    [failed] = [configuration for configuration in configurations(results, "tpe") if configuration.state == "failed"]
    assert failed.values["recipe.lr"] == 1e30
    kept = read_collection(results / "collections/sweep/tpe")
    assert kept is not None and kept.status == "failed" and len(kept.runs) == 2 * 5
    assert {*kept.failed} == {*failed.runs}
    assert all("not finite" in why for why in kept.failed.values()), kept.failed


def test_asha_stops_by_the_mean_over_seeds_and_what_it_stopped_can_be_resumed(halved, searched):
    results, _ = halved
    tried = SweepFolder(results / "sweeps" / "tpe").load().configurations[len(FINISHED) :]
    found = [one for one in tried if one.state != "failed"]
    stopped = [one for one in found if one.state == "stopped"]
    assert stopped and {one.state for one in found} == {"stopped", "finished"}
    for one in found:
        assert all(score == pytest.approx(mean_at(one, epoch, results)) for epoch, score in one.curve.items())
        assert one.curve or one.state == "finished"
        if one.state == "stopped":
            assert one.epoch < 3 and one.score == one.curve[one.epoch]
            assert all(not (results / run / "train.json").exists() for run in one.runs)
            assert all((results / run / "state").exists() for run in one.runs)
    continued = [one for one in stopped if one.values["recipe.lr"] in RATES]
    folders = [RunFolder(searched / run) for one in continued for run in one.runs]
    resumed = [done.resumed for folder in folders if (done := folder.read_training())]
    assert len(resumed) == 2 * len(continued) > 0 and all(resumed)


class Recorder:
    """A listener that records its calls."""

    def __init__(self) -> None:
        self.began: list[int] = []
        self.reports: list[tuple[int, TrialReport]] = []
        self.ends: dict[int, TrialReport] = {}

    def started(self, trial, drawn):
        self.began.append(drawn["number"])

    def reported(self, trial, drawn, report):
        self.reports.append((drawn["number"], report))

    def ended(self, trial, drawn, report):
        self.ends[drawn["number"]] = report


def facts(results, config):
    """Learned weights and counts of a finished run."""
    folder = RunFolder(results / config.path)
    training = folder.read_training()
    return training.checkpoint_sha256, [(e.target, e.correct, e.total) for e in folder.read_evaluations()]


def stray(results):
    return [path for path in results.rglob("*") if path.name.endswith(".tmp") or path.name == "state"]


LONG = run("maple", epochs=2)
BROKEN = run(seed=3)
RUNS = [LONG, run("zeroshot"), run("coop")]


@pytest.fixture(scope="module")
def executed(local_ray, few_digits, tmp_path_factory):
    """Three runs and a broken one; the process of the first is killed after its first checkpoint."""
    from ray.tune.search import grid_search
    from ray.tune.search.basic_variant import BasicVariantGenerator

    results, saved = tmp_path_factory.mktemp("there"), tmp_path_factory.mktemp("saved") / "folder"
    recorder, done = Recorder(), threading.Event()
    tasks = [*map(spec, RUNS), spec(BROKEN, ["shapes-sketch:all:train"])]

    def waits_once(config, runtime):
        """On the node: the first process of the first run stops after its first checkpoint, until it is killed."""
        from runner.resumable_training import ResumableTraining

        save = ResumableTraining.save

        def save_and_wait(training, *status):
            save(training, *status)
            saved.write_text(os.getcwd())
            time.sleep(600)

        if config["number"] == 0 and not saved.exists():
            ResumableTraining.save = save_and_wait  # type: ignore[method-assign]
        return [tasks[config["number"]]]

    def kill() -> None:
        """Kill the process of the first run after its first checkpoint."""
        while not (saved.exists() and saved.read_text()):
            assert not done.wait(0.02), "no state was saved before the end"
        holder = re.search(r"pid (\d+)", (results / LONG.path / ".lock").read_text())
        assert holder, "no process to kill"
        os.kill(int(holder[1]), signal.SIGKILL)

    paths = make_paths(few_digits, results, state_seconds=0.0)
    space, generator = {"number": grid_search(list(range(len(tasks))))}, BasicVariantGenerator(max_concurrent=1)
    with connect(Launcher(kind="ray", address=local_ray), paths) as found, ThreadPoolExecutor(1) as killer:
        assert found == Capacity(Resources(1, 1.0, 0.0), 3, ray=True)
        killed = killer.submit(kill)
        try:
            run_trials(space, TrialWork.on(found, paths, waits_once), found, recorder, search_alg=generator)
        finally:
            done.set()
    killed.result()
    # Runs execute in the folder of their node: relative names, as in $PROCAP_HOME, keep their meaning.
    assert saved.read_text() == os.getcwd()
    return results, recorder


def test_runs_on_nodes_have_the_bits_of_local_ones_also_after_a_killed_process(executed, few_digits, tmp_path):
    results, recorder = executed
    here = Recorder()
    launch(list(map(spec, RUNS)), make_paths(few_digits, tmp_path), Capacity(Resources(), 1, ray=False), here)
    assert all(report.state == "finished" for report in here.ends.values()), here.ends
    assert sorted(recorder.began) == [0, 0, 1, 2, 3]
    assert [facts(results, one) for one in RUNS] == [facts(tmp_path, one) for one in RUNS]
    training = RunFolder(results / LONG.path).read_training()
    assert training is not None and training.resumed == 1


def test_a_run_that_fails_stops_no_other(executed):
    results, recorder = executed
    assert recorder.ends[3].state == "failed" and "train" in recorder.ends[3].why
    assert "Traceback" not in recorder.ends[3].why
    assert [recorder.ends[number].state for number in range(3)] == ["finished"] * 3
    assert not stray(results)


@pytest.mark.slow
def test_groups_are_placed_as_a_whole_or_not_at_all(local_ray, few_digits, tmp_path):
    """Two runs of two processes each at once, on three CPUs: half-placed ones would wait for ever."""
    runs = [run(seed=seed) for seed in (1, 2)]
    recorder = Recorder()
    paths = make_paths(few_digits, tmp_path, timeout=900.0)
    with connect(Launcher(kind="ray", address=local_ray, processes=2), paths) as found:
        assert found.max_concurrent == 1
        launch([spec(one, targets=()) for one in runs], paths, replace(found, max_concurrent=2), recorder)
    assert {number: report.state for number, report in recorder.ends.items()} == {0: "finished", 1: "finished"}
    for one in runs:
        training = RunFolder(tmp_path / one.path).read_training()
        assert training is not None and training.processes == 2


@pytest.mark.slow
def test_a_group_waits_for_a_run_that_another_process_holds(local_ray, few_digits, tmp_path):
    one, recorder = run(), Recorder()
    paths = make_paths(few_digits, tmp_path, timeout=900.0)
    with connect(Launcher(kind="ray", address=local_ray, processes=2), paths) as found:
        with RunFolder(tmp_path / one.path).locked():
            group = threading.Thread(target=launch, args=([spec(one)], paths, found, recorder))
            group.start()
            while not any(report.state == "waiting" for _, report in recorder.reports):
                assert group.is_alive(), recorder.ends
                time.sleep(0.1)
        group.join()
    assert f"pid {os.getpid()} on" in next(report.why for _, report in recorder.reports if report.state == "waiting")
    assert recorder.began == [0] and recorder.ends[0].state == "finished"


def test_what_cannot_be_placed_is_refused_before_anything_waits(local_ray, few_digits, tmp_path):
    for launcher, message in (
        (Launcher(kind="ray", address=local_ray, processes=4), "hold 3 such processes"),
        (Launcher(kind="ray", address=local_ray, gpus=1), "hold 0 such processes"),
        (Launcher(kind="ray", address=local_ray, cpus=4), "hold 0 such processes"),
        (Launcher(kind="ray", address=local_ray, cpus=0), "a run needs a CPU or a GPU"),
        (Launcher(kind="ray", address=local_ray, cpus=0, gpus=0), "a run needs a CPU or a GPU"),
    ):
        with pytest.raises(UsageError, match=message), connect(launcher, make_paths(few_digits, tmp_path)):
            pass


def test_one_warning_says_that_runs_wait_for_nodes(local_ray, few_digits, tmp_path, monkeypatch, caplog):
    with connect(Launcher(kind="ray", address=local_ray), make_paths(few_digits, tmp_path)):
        callback = make_callback(Recorder(), Capacity(Resources(1, 4.0), 1, ray=True))
        for iteration in range(3):
            callback.on_step_end(iteration, [])
        monkeypatch.setattr("cluster.tune_runner.nodes", list)
        with pytest.raises(UserError, match=r"has lost the node .* that this command belongs to"):
            callback.on_step_end(3, [])
    [record] = caplog.records
    assert record.message.startswith("waiting: a run that asks for 4 CPUs does not fit on the nodes of the cluster now")


def test_the_port_of_a_process_group_stays_reserved(local_ray):
    rank = Rank()
    _, _, port = rank.locate()
    with closing(socket.socket()) as other, pytest.raises(OSError, match="in use"):
        other.bind(("", port))


@pytest.mark.slow
def test_a_run_that_always_loses_its_process_is_started_five_times(local_ray, few_digits, tmp_path):
    recorder, paths = Recorder(), make_paths(few_digits, tmp_path)
    with connect(Launcher(kind="ray", address=local_ray), paths) as found:
        work = TrialWork.on(found, paths, lambda config, runtime: os._exit(1))
        run_trials({"number": 7}, work, found, recorder)
    assert recorder.began == [7] * 5
    assert recorder.ends[7].state == "failed"
    assert "given up after 5 attempts: The actor is dead because" in recorder.ends[7].why


def test_a_missing_device_is_refused_locally_and_left_to_the_nodes_of_a_cluster(local_ray, few_digits, tmp_path):
    """A numbered GPU is refused on a cluster: a process of Ray sees only its own."""
    paths = make_paths(few_digits, tmp_path)
    paths = replace(paths, runtime=replace(paths.runtime, device="cuda:99"))
    for at_once in (1, 2):
        launcher = Launcher(max_concurrent=at_once)
        with pytest.raises(UsageError, match="device 'cuda:99' does not exist"), connect(launcher, paths):
            pass
    cluster = Launcher(kind="ray", address=local_ray)
    with pytest.raises(UsageError, match=r"--device cuda:99: .*: use --device cuda$"), connect(cluster, paths):
        pass
    with connect(cluster, replace(paths, runtime=replace(paths.runtime, device="cuda"))) as found:
        assert found.max_concurrent == 3


def test_a_sweep_reads_data_behind_a_url(local_ray, few_digits, where, tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("PROCAP_HOME", str(tmp_path / "home"))
    with LocalServer(few_digits) as server:
        places = [*where, "--data", server.url, "--results", str(tmp_path / "results")]
        assert main(["sweep", *ASKED[:-4], "--seeds", "1", "--epochs", "1", "--param", "lr=0.1", *places]) == 0
