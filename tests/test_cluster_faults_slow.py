"""Suites and sweeps on a cluster of three hosts while its parts are killed: the same results as in one process."""

import shutil
import signal
import time
from pathlib import Path

import pytest
from fault_cluster import (
    FaultCluster,
    count_tracked,
    find_leftovers,
    load_outcomes,
    start_cluster,
    wait_for,
    without_cluster,
)
from nodes import find_trials

from runner.remote_results import results_root
from runner.run_folders import find_runs
from shards.builtin_sources import builtin_source
from shards.catalogue import find
from shards.pack import pack_source

pytestmark = pytest.mark.slow

COMMANDS = {
    "suite": ["bench", "base-to-novel", "--datasets", "digits", "--methods", "coop,maple", "--seeds", "1,2,3,4,5,6",
              "--epochs", "20"],
    "sweep": ["sweep", "--name", "grid", "--datasets", "digits", "--methods", "maple", "--seeds", "1,2,3", "--shots",
              "4", "--param", "lr=0.002,0.01", "--param", "depth=3,6", "--epochs", "16", "--batch-size", "4"],
}  # fmt: skip


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    with start_cluster(tmp_path_factory.mktemp("site")) as found:
        yield found


@pytest.fixture
def cluster(there: FaultCluster) -> FaultCluster:
    there.restore()
    return there


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The results of both commands, one run after the other in one process."""
    folder = tmp_path_factory.mktemp("alone")
    here = without_cluster(folder)
    for name, words in COMMANDS.items():
        here.procap(*words, "--max-concurrent", "1", "--tracking", "off", "--results", folder / name).wait()
    return {name: folder / name for name in COMMANDS}


def check_as_alone(results: Path, reference: Path) -> None:
    """Assert that results are those of the reference, tracked once and without leftovers."""
    assert load_outcomes(results) == load_outcomes(reference) and len(load_outcomes(reference)) == 12
    runs, parents = count_tracked(results)
    assert set(runs) == set(load_outcomes(reference)) and set(runs.values()) == {1}
    assert parents == ["FINISHED"]
    assert not find_leftovers(results)


FAULTS = ("nothing", "worker", "node", "node replaced", "driver", "driver and node")


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", COMMANDS)
def test_after_any_fault_the_results_equal_those_of_one_process(name, fault, cluster, alone, tmp_path):
    words = [*COMMANDS[name], *cluster.flags, "--results", str(tmp_path)]
    command = cluster.procap(*words)
    victim = cluster.node_on(2)
    if fault != "nothing":
        [training, *_] = wait_for(lambda: cluster.find_trainings(tmp_path, victim))
    if fault == "worker":
        training.process.kill()
    if "driver" in fault:
        command.process.kill()
        command.wait(-signal.SIGKILL)
    if "node" in fault:
        victim.kill()
    if fault == "node replaced":
        time.sleep(3)
        cluster.nodes.add(cpus=1)
    if "driver" in fault:
        command = cluster.procap(*words)
    _, err = command.wait()
    check_as_alone(tmp_path, alone[name])
    if fault in ("worker", "node", "node replaced"):
        # The run of a node that is gone may look held for a while.
        assert "lost the process of" in err or (fault != "worker" and "waiting:" in err), err


ONE = ["bench", "base-to-novel", "--datasets", "digits", "--methods", "maple", "--seeds", "1", "--epochs", "8"]


@pytest.mark.parametrize("fault", ["worker", "node", "network"])
def test_a_group_of_two_processes_is_placed_again_as_a_whole(fault, cluster, tmp_path):
    results, reference = tmp_path / "together", tmp_path / "alone"
    cluster.procap(*ONE, "--tracking", "off", "--results", reference).wait()
    # Typed on the head's host, so that a rank is on one of the two that may be killed.
    command = cluster.procap(*ONE, *cluster.flags, "--processes", "2", "--results", results, on=0)
    [training] = wait_for(lambda: cluster.find_trainings(results))
    node = next(node for node in cluster.nodes.alive[1:] if ranks(node))
    if fault == "worker":
        ranks(node)[0].kill()
    elif fault == "node":
        node.kill()
    elif not cluster.nodes.hosts:
        pytest.skip("no network namespaces here")
    else:
        node.disconnect()
    try:
        _, err = command.wait()
    finally:
        if fault == "network":
            node.kill()
            node.reconnect()
    assert "lost the process of" in err
    mine, one = load_outcomes(results), load_outcomes(reference)
    assert [counts for _, counts in mine.values()] == [counts for _, counts in one.values()]
    done, other = training.run.read_training(), find_runs(reference)[0].read_training()
    assert done is not None and other is not None and done.processes == 2 and done.resumed == 1
    losses = [[row.terms["ce"] for row in result.epochs] for result in (done, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert not find_leftovers(results) and count_tracked(results) == ({path: 1 for path in mine}, ["FINISHED"])


def ranks(node):
    return [process for _, process in node.find_processes("ray::Rank")]


def test_two_sweeps_of_one_name_and_two_that_share_runs(cluster, tmp_path):
    shared = ["sweep", "--datasets", "digits", "--methods", "maple", "--seeds", "1,2,3", "--epochs", "4"]
    shared += ["--shots", "4", "--batch-size", "4", "--results", str(tmp_path)]
    one = [*shared, "--name", "one", "--param", "lr=0.002,0.01"]
    first = cluster.procap(*one, *cluster.flags)
    # At once, so that the first is still there when they have come to look.
    wait_for((tmp_path / "sweeps" / "one" / ".lock").exists)
    refused = [cluster.procap(*one, *cluster.flags, on=2), cluster.procap(*one, on=2)]
    wait_for(lambda: cluster.find_trainings(tmp_path, saved=False))
    second = cluster.procap(*shared, "--name", "two", "--param", "lr=0.01,0.05", *cluster.flags, on=2)
    for command in refused:
        _, err = command.wait(1)
        assert f"pid {first.process.pid} on" in err and err.count("error:") == 1, err
    first.wait()
    second.wait()
    trained = [run.read_training() for run in find_runs(tmp_path)]
    assert len(trained) == 9 and all(done is not None and done.resumed == 0 for done in trained)
    runs, parents = count_tracked(tmp_path)
    assert len(runs) == 9 and set(runs.values()) == {1} and parents == ["FINISHED"] * 2
    assert not find_leftovers(tmp_path)


def test_a_broken_shard_fails_its_runs_alone(cluster, tmp_path):
    data, results = tmp_path / "data", tmp_path / "results"
    words = ["bench", "base-to-novel", "--datasets", "digits,tiles", "--methods", "coop", "--seeds", "1,2", "--epochs"]
    words += ["1", "--profile", "mini", "--data", str(data), "--results", str(results), *cluster.flags]
    for name in ("digits", "tiles"):
        pack_source(builtin_source(find(name)), data)
    shard = next((data / "tiles" / "test").glob("*.tar"))
    whole = shard.read_bytes()
    broken = bytearray(whole)
    broken[2000:2100] = bytes(100)
    shard.write_bytes(broken)
    out, err = cluster.procap(*words).wait(3)
    assert "2 done, 2 failed" in err and err.count("tiles") >= 2
    last = err.strip().splitlines()[-1]
    assert last.startswith("  2, such as base/tiles/coop/") and shard.name in last, err
    assert all(f"base/tiles/coop/mini/16shot/seed{seed}" in err for seed in (1, 2)), err
    shard.write_bytes(whole)
    out, err = cluster.procap(*words).wait()
    assert "2 finished already" in err and "on average over 2 data sets" in out and len(load_outcomes(results)) == 4
    assert not find_leftovers(results)


@pytest.mark.parametrize("signum, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_driver_ends_every_training_and_repeating_resumes(signum, code, cluster, alone, tmp_path):
    words = [*COMMANDS["suite"], *cluster.flags, "--results", str(tmp_path)]
    command = cluster.procap(*words)
    wait_for(lambda: len(cluster.find_trainings(tmp_path)) > 1)
    command.process.send_signal(signum)
    _, err = command.wait(code)
    assert "Traceback" not in err and "is kept" in err.splitlines()[-1], err[-2000:]
    wait_for(lambda: not find_trials(cluster.nodes.alive))
    cluster.procap(*words).wait()
    check_as_alone(tmp_path, alone["suite"])


def test_a_host_that_is_cut_off_loses_its_run_to_another(cluster, alone, tmp_path):
    if not cluster.nodes.hosts:
        pytest.skip("no network namespaces here")
    command = cluster.procap(*COMMANDS["suite"], *cluster.flags, "--results", tmp_path)
    node = cluster.node_on(2)
    wait_for(lambda: cluster.find_trainings(tmp_path, node))
    node.disconnect()
    try:
        command.wait()
    finally:
        node.kill()
        node.reconnect()
    check_as_alone(tmp_path, alone["suite"])


def test_a_command_whose_own_node_dies_reports_it_and_resumes_when_repeated(cluster, alone, tmp_path):
    if not cluster.nodes.hosts:
        pytest.skip("no network namespaces here")
    words = [*COMMANDS["suite"], *cluster.flags, "--results", str(tmp_path)]
    command = cluster.procap(*words, on=2)
    wait_for(lambda: len(cluster.find_trainings(tmp_path)) > 1)
    cluster.node_on(2).kill()
    # The processes that it has on other nodes may be done with all before Ray knows.
    _, err = command.wait(0, 1)
    code = command.process.returncode
    if code:
        assert f"Ray has lost the node on {cluster.nodes.hosts[2].name}" in err and "repeat the command" in err
    assert "failed" not in err and err.count("error:") == code, err
    wait_for(lambda: not find_trials(cluster.nodes.alive))
    cluster.restore()
    cluster.procap(*words, on=2).wait()
    check_as_alone(tmp_path, alone["suite"])


def test_a_lost_head_without_redis_ends_the_driver_and_repeating_resumes(alone, tmp_path):
    results = tmp_path / "results"
    words = [*COMMANDS["suite"], "--results", str(results)]
    with start_cluster(tmp_path / "first") as lost:
        command = lost.procap(*words, *lost.flags)
        wait_for(lambda: lost.find_trainings(results, lost.nodes.nodes[2]))
        lost.nodes.nodes[0].kill()
        command.wait(1)
        wait_for(lambda: not find_trials(lost.nodes.alive))
    with start_cluster(tmp_path / "second") as new:
        new.procap(*words, *new.flags).wait()
    check_as_alone(results, alone["suite"])


@pytest.mark.skipif(not shutil.which("redis-server"), reason="takes redis-server")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_head_with_its_state_in_redis_comes_back_and_the_driver_continues(name, alone, tmp_path):
    results = tmp_path / "results"
    with start_cluster(tmp_path / "site", redis=True) as shared:
        command = shared.procap(*COMMANDS[name], *shared.flags, "--results", results)
        wait_for(lambda: shared.find_trainings(results, shared.nodes.nodes[2]))
        shared.nodes.nodes[0].kill()
        time.sleep(5)
        shared.start_node()
        command.wait()
    check_as_alone(results, alone[name])


def test_results_behind_a_url_survive_a_lost_node_and_a_lost_driver(alone, tmp_path):
    with start_cluster(tmp_path, objects=True) as shared:
        server = shared.server
        results = f"s3://{server.bucket}/lab"
        words = [*COMMANDS["suite"], *shared.flags, "--results", results]
        command = shared.procap(*words)
        wait_for(lambda: server.count_requests("PUT", "train.json"))
        shared.nodes.nodes[2].kill()
        wait_for(lambda: server.count_requests("PUT", "train.json") >= 4)
        command.process.kill()
        command.wait(-signal.SIGKILL)
        shared.procap(*words).wait()
        copy, _ = results_root(results, Path(shared.environment["PROCAP_HOME"]))
        check_as_alone(copy, alone["suite"])
