"""Results behind a URL: a finished run always has its weights, and machines continue the runs of each other."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from procap.errors import NotFound, Unreachable, UsageError
from runner import remote_results
from runner.remote_results import RemoteResults, results_root
from shards.remote import list_files, read_files, upload

RUN = "base/toy/coop/mini/16shot/seed1-0123abcd"
OTHER = "base/toy/coop/mini/16shot/seed2-89abcdef"


@pytest.fixture
def here(tmp_path) -> RemoteResults:
    return RemoteResults(f"local://{tmp_path}/remote", tmp_path / "here")


@pytest.fixture
def elsewhere(here, tmp_path) -> RemoteResults:
    return RemoteResults(here.url, tmp_path / "elsewhere")


def write(store: RemoteResults, files: dict[str, bytes], run: str = RUN) -> None:
    for name, content in files.items():
        file = store.local / run / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def finished(weights: bytes, **more: bytes) -> dict[str, bytes]:
    train = json.dumps({"checkpoint_sha256": hashlib.sha256(weights).hexdigest()}).encode()
    return {"config.json": b"{}", "checkpoint.safetensors": weights, "train.json": train, **more}


def content(store: RemoteResults, run: str = RUN) -> dict[str, bytes]:
    folder = store.local / run
    files = (file for file in sorted(folder.rglob("*")) if file.is_file() and not file.name.startswith("."))
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


def remote_files(store: RemoteResults, run: str = RUN) -> dict[str, bytes]:
    assert store.url
    return read_files(f"{store.url}/{run}", list_files(f"{store.url}/{run}"))


def test_pull_downloads_documents_without_weights_and_states(here, elsewhere):
    for run in (RUN, OTHER):
        write(here, finished(run.encode()), run)
        here.push(run)
        assert remote_files(here, run) == finished(run.encode())
    write(here, {"step-1.safetensors": b"state", "progress.json": b"{}"}, "base/toy/maple/mini/16shot/seed1-00000000/x")
    write(here, {"collection.json": b"{}"}, "collections/suite/table-1")
    here.push()
    elsewhere.pull()
    for run in (RUN, OTHER):
        assert set(content(elsewhere, run)) == {"config.json", "train.json"}
    assert content(elsewhere, "collections/suite/table-1") == {"collection.json": b"{}"}
    elsewhere.pull(RUN, weights=True)
    assert content(elsewhere) == finished(RUN.encode()), "weights follow when they are needed"


def test_a_run_continues_elsewhere_from_the_last_pushed_state(here, elsewhere):
    write(here, {"config.json": b"{}", "progress.json": b"1", "state/step-1.safetensors": b"one"})
    here.push(RUN)
    (here.local / RUN / "state/step-1.safetensors").unlink()
    # Of another size: it may be written within the same tick of the file system's clock.
    write(here, {"progress.json": b"22", "state/step-2.safetensors": b"two"})
    here.push(RUN)
    elsewhere.pull(RUN, weights=True)
    assert set(content(elsewhere)) == {"config.json", "progress.json"}, "a state is for who holds the run"
    elsewhere.pull(RUN, weights=True, states=True)
    assert content(elsewhere) == {"config.json": b"{}", "progress.json": b"22", "state/step-2.safetensors": b"two"}
    shutil.rmtree(elsewhere.local / RUN / "state")
    (elsewhere.local / RUN / "progress.json").unlink()
    write(elsewhere, finished(b"prompts"))
    elsewhere.push(RUN)
    assert remote_files(here) == finished(b"prompts"), "a finished run leaves no state behind"
    here.pull(RUN, weights=True, states=True)
    assert content(here) == finished(b"prompts")


class Killed(BaseException):
    """What no `except Exception` stops, as nothing stops a kill."""


def counted(plain, left: list[int]):
    """`plain`, which raises Killed when the calls that are left are used up."""

    def call(*args, **kwargs):
        if left[0] == 0:
            raise Killed
        left[0] -= 1
        return plain(*args, **kwargs)

    return call


def is_whole(files: dict[str, bytes]) -> bool:
    if "train.json" not in files:
        return True
    named = json.loads(files["train.json"])["checkpoint_sha256"]
    return named == hashlib.sha256(files.get("checkpoint.safetensors", b"")).hexdigest()


def life_of_a_run(store: RemoteResults) -> None:
    """A training with a rotated state, its end, an evaluation, and the same once more after --force."""
    for weights in (b"prompts", b"other prompts"):
        write(store, {"config.json": b"{}", "progress.json": b"1", "state/step-1.safetensors": b"one"})
        store.push(RUN)
        (store.local / RUN / "state/step-1.safetensors").unlink()
        write(store, {"state/step-2.safetensors": b"two"})
        store.push(RUN)
        write(store, finished(weights))
        shutil.rmtree(store.local / RUN / "state")
        (store.local / RUN / "progress.json").unlink()
        store.push(RUN)
        write(store, {"eval/toy-base-test.json": weights})
        store.push(RUN)
        if weights == b"prompts":
            for name in content(store):
                (store.local / RUN / name).unlink()
            store.delete_run(RUN)


def test_a_kill_between_any_two_uploads_leaves_no_finished_run_without_weights(tmp_path, monkeypatch):
    left = [0]
    for name in ("upload", "delete"):
        monkeypatch.setattr(remote_results, name, counted(getattr(remote_results, name), left))
    last = b"other prompts"
    for kill_at in range(200):
        url = f"local://{tmp_path}/{kill_at}/remote"
        here, elsewhere = (RemoteResults(url, tmp_path / str(kill_at) / name) for name in ("here", "elsewhere"))
        left[0] = kill_at
        try:
            life_of_a_run(here)
            done = True
        except Killed:
            done = False
        left[0] = 10**6
        assert is_whole(remote_files(here)), f"after {kill_at} calls"
        elsewhere.pull(RUN, weights=True, states=True)
        assert is_whole(content(elsewhere))
        here.push(RUN)
        assert is_whole(remote_files(here))
        if done:
            assert remote_files(here) == finished(last, **{"eval/toy-base-test.json": last})
            break
    assert done and kill_at > 20


def test_a_kill_during_a_pull_leaves_no_finished_run_without_weights(tmp_path, monkeypatch):
    url = f"local://{tmp_path}/remote"
    here = RemoteResults(url, tmp_path / "here")
    left = [0]
    for name in ("write_bytes", "download"):
        monkeypatch.setattr(remote_results, name, counted(getattr(remote_results, name), left))
    for kill_at in range(20):
        elsewhere = RemoteResults(url, tmp_path / str(kill_at))
        shutil.rmtree(here.local, ignore_errors=True)
        here.delete_run(RUN)
        write(here, finished(b"prompts"))
        here.push(RUN)
        left[0] = 10**6
        elsewhere.pull(RUN, weights=True)
        here.delete_run(RUN)
        write(here, finished(b"other prompts", **{"eval/toy-base-test.json": b"[2]"}))
        here.push(RUN)
        left[0] = kill_at
        try:
            elsewhere.pull(RUN, weights=True)
            done = True
        except Killed:
            done = False
        left[0] = 10**6
        assert is_whole(content(elsewhere)), f"after {kill_at} files"
        elsewhere.pull(RUN, weights=True)
        assert content(elsewhere) == content(here)
        if done:
            break
    assert done and kill_at > 2


def test_a_folder_and_a_file_url_are_the_folder_itself(tmp_path):
    assert results_root("results", tmp_path) == (Path("results"), None)
    assert results_root(f"file://{tmp_path}/a%20b", tmp_path) == (tmp_path / "a b", None)
    RemoteResults(None, tmp_path / "nowhere").push(RUN)
    RemoteResults(None, tmp_path / "nowhere").pull(RUN, weights=True)
    assert not (tmp_path / "nowhere").exists()


def test_a_key_of_a_bucket_that_would_leave_the_results_is_left_out(s3, tmp_path):
    url, store = f"s3://{s3.bucket}/{tmp_path.name}", tmp_path / "here"
    upload(b"{}", f"{url}//{tmp_path}/outside/seed1-0123abcd/train.json")
    upload(b"{}", f"{url}/../..{tmp_path}/outside/config.json")
    write(RemoteResults(url, tmp_path / "other"), finished(b"prompts"))
    RemoteResults(url, tmp_path / "other").push(RUN)
    RemoteResults(url, store).pull()
    assert (store / RUN / "train.json").exists() and not (tmp_path / "outside").exists()


def test_an_address_that_cannot_hold_results_is_one_line(s3, tmp_path):
    with pytest.raises(UsageError, match="is empty"):
        results_root("", tmp_path)
    with pytest.raises(UsageError, match=r"results cannot be written to https://x/y: name a folder or a URL"):
        results_root("https://x/y", tmp_path)
    with pytest.raises(NotFound, match=r"s3://no-such-bucket/y/base.* is not there"):
        RemoteResults("s3://no-such-bucket/y", tmp_path).pull("base", weights=True)


def test_a_server_that_is_down_is_one_line_and_loses_nothing(s3, tmp_path, monkeypatch):
    store = RemoteResults(f"s3://{s3.bucket}/away", tmp_path / "here")
    write(store, finished(b"prompts"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    # The address is a setting of the machine, which a process reads once.
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(Unreachable, match=r"s3://results/away/.* cannot be reached \(.*\); try again later") as error:
        store.push(RUN)
    assert "\n" not in str(error.value) and "not-a-secret" not in str(error.value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.address)
    s3fs.S3FileSystem.clear_instance_cache()
    store.push(RUN)
    assert remote_files(store) == finished(b"prompts")
