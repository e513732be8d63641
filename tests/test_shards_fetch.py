"""Fetching: whole or not at all, once per machine, resumed, and every failure is one line that names the URL."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import shutil
import socket
import ssl
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from local_server import Answer, LocalServer

from shards import fetch, remote
from shards.errors import DataError, DataUsageError
from shards.fetch import download
from shards.remote import Unreachable, open_url
from shards.urls import canonical, is_url, join, shown

BYTES = bytes(range(256)) * 9000
SHA256 = hashlib.sha256(BYTES).hexdigest()


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "WAITS", (0.01, 0.01, 0.01))
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    (tmp_path / "www").mkdir()
    (tmp_path / "www" / "a.tar").write_bytes(BYTES)
    with LocalServer(tmp_path / "www") as running:
        yield running


@pytest.fixture
def target(tmp_path) -> Path:
    return tmp_path / "here" / "a.tar"


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def one_line(error: BaseException, *words: str) -> bool:
    text = str(error)
    return "\n" not in text and all(word in text for word in words)


def test_a_file_arrives_whole_under_its_name_with_progress(server, target):
    steps: list[tuple[int, int | None]] = []
    download(
        f"{server.url}/a.tar", target, sha256=SHA256, size=len(BYTES), on_progress=lambda *step: steps.append(step)
    )
    assert target.read_bytes() == BYTES and names(target.parent) == ["a.tar"]
    assert steps[-1] == (len(BYTES), len(BYTES)) and steps == sorted(steps)
    download(f"{server.url}/a.tar", target, sha256=SHA256)
    assert len(server.asked) == 1, "what is there and right is not fetched again"


def test_paths_and_file_urls_are_read_directly(server, tmp_path, target):
    odd = tmp_path / "a b#c?d%.tar"
    odd.write_bytes(BYTES)
    for url in (str(odd), "file://" + str(odd).replace("%", "%25").replace(" ", "%20").replace("#", "%23")):
        with open_url(url) as stream:
            assert stream.read() == BYTES and stream.read(1) == b""
    download(str(odd), target, sha256=SHA256)
    assert target.read_bytes() == BYTES and not server.asked
    with pytest.raises(DataError, match=r"nothing\.tar is not there"):
        open_url(str(tmp_path / "nothing.tar"))
    with pytest.raises(DataUsageError, match="another machine"):
        open_url("file://elsewhere/a.tar")


def test_a_wrong_hash_is_named_and_nothing_is_kept(server, target):
    with pytest.raises(DataError) as error:
        download(f"{server.url}/a.tar", target, sha256="0" * 64)
    assert one_line(error.value, f"{server.url}/a.tar", SHA256, "0" * 64)
    assert names(target.parent) == []


def test_a_wrong_hash_leaves_what_was_there_before(server, target):
    target.parent.mkdir()
    target.write_bytes(b"older")
    with pytest.raises(DataError, match="SHA-256"):
        download(f"{server.url}/a.tar", target, sha256="0" * 64)
    assert target.read_bytes() == b"older"


@pytest.mark.parametrize("length", [True, False])
def test_a_wrong_size_is_refused_before_or_while_it_is_read(server, target, length):
    server.always["/a.tar"] = Answer(length=length)
    with pytest.raises(DataError, match="not the file that is expected"):
        download(f"{server.url}/a.tar", target, size=1000)
    with pytest.raises(DataError, match="not the file that is expected"):
        download(f"{server.url}/a.tar", target, size=len(BYTES) + 1)
    assert names(target.parent) == []


def test_a_cut_connection_is_resumed_where_it_broke(server, target):
    server.answers["/a.tar"] = [Answer(cut=1_500_000), Answer(cut=300_000)]
    download(f"{server.url}/a.tar", target, sha256=SHA256)
    assert target.read_bytes() == BYTES and names(target.parent) == ["a.tar"]
    assert server.asked[1:] == [("/a.tar", "bytes=1500000-"), ("/a.tar", "bytes=1800000-")]


def test_a_server_without_ranges_is_asked_from_the_start(server, target):
    server.ranges = False
    server.answers["/a.tar"] = [Answer(cut=1_500_000)]
    download(f"{server.url}/a.tar", target, sha256=SHA256)
    assert target.read_bytes() == BYTES


@pytest.mark.parametrize("careless", [False, True])
def test_a_file_that_changed_meanwhile_is_not_glued_together(server, target, careless):
    other = BYTES[::-1]
    changed = Answer(data=other, careless=careless)
    server.answers["/a.tar"] = [Answer(cut=1_500_000), changed, changed]
    download(f"{server.url}/a.tar", target)
    assert target.read_bytes() == other


def test_the_next_call_goes_on_from_what_the_last_one_left(server, target):
    server.answers["/a.tar"] = [Answer(cut=500_000), *(Answer(503) for _ in range(3))]
    with pytest.raises(Unreachable, match="503 Service Unavailable"):
        download(f"{server.url}/a.tar", target)
    assert not target.exists()
    download(f"{server.url}/a.tar", target, sha256=SHA256)
    assert server.asked[-1] == ("/a.tar", "bytes=500000-") and names(target.parent) == ["a.tar"]


def test_the_part_of_another_url_is_not_gone_on_with(server, target):
    (server.folder / "b.tar").write_bytes(BYTES)
    server.answers["/b.tar"] = [Answer(cut=500_000), *(Answer(500) for _ in range(3))]
    with pytest.raises(Unreachable):
        download(f"{server.url}/b.tar", target)
    download(f"{server.url}/a.tar", target, sha256=SHA256)
    assert server.asked[-1] == ("/a.tar", "")


@pytest.mark.parametrize(
    "status, words, attempts",
    [(404, "not there", 1), (403, "not open to everyone", 1), (400, "400 Bad Request", 1), (503, "try again later", 4)],
)
def test_refusals_of_the_server_are_one_line(server, target, status, words, attempts):
    server.always["/a.tar"] = Answer(status)
    with pytest.raises(DataError) as error:
        download(f"{server.url}/a.tar", target)
    assert one_line(error.value, f"{server.url}/a.tar", str(status), words)
    assert len(server.asked) == attempts and names(target.parent) == []


def test_a_stream_that_ends_early_is_no_short_file(server):
    server.always["/a.tar"] = Answer(cut=100_000)
    with open_url(f"{server.url}/a.tar") as stream, pytest.raises(Unreachable, match="was cut short"):
        stream.read()


def test_a_silent_server_is_given_up(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(remote, "TIMEOUT", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(Unreachable, match=r"no answer for 0\.2 s"):
            open_url(f"http://127.0.0.1:{silent.getsockname()[1]}/a.tar", retry=False)


def test_nobody_listening_and_no_such_host_are_one_line(server, target):
    with socket.socket() as held:
        # Bound, so that no other program gets the port, and not listening.
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        for url in (f"http://127.0.0.1:{port}/a.tar", "http://no-such-host.invalid/a.tar"):
            with pytest.raises(Unreachable) as error:
                download(url, target)
            assert one_line(error.value, url, "cannot be reached")


def test_a_certificate_nobody_signed_is_refused(tmp_path, monkeypatch):
    if not shutil.which("openssl"):
        pytest.skip("needs openssl")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=127.0.0.1"
    subprocess.run([*make.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with LocalServer(tmp_path) as server:
        # Its thread must be at work: before, it would ask the socket that is wrapped for its number.
        open_url(f"{server.url}/cert.pem").close()
        server._server.socket = context.wrap_socket(server._server.socket, server_side=True)
        url = f"https://{server.host}/cert.pem"
        with pytest.raises(DataError) as error:
            open_url(url)
        assert one_line(error.value, url, "certificate") and not isinstance(error.value, Unreachable)


def test_redirects_lead_to_the_web_only(server, tmp_path):
    (tmp_path / "secret").write_text("secret")
    for to in (f"file://{tmp_path}/secret", "ftp://127.0.0.1/a.tar", "pipe:echo"):
        server.always["/b.tar"] = Answer(302, to=to)
        with pytest.raises(DataError) as error:
            open_url(f"{server.url}/b.tar")
        assert one_line(error.value, f"{server.url}/b.tar")
    server.always["/b.tar"] = Answer(302, to=f"{server.url}/a.tar")
    with open_url(f"{server.url}/b.tar") as stream:
        assert stream.read() == BYTES
    server.always["/b.tar"] = Answer(302, to=f"{server.url}/b.tar")
    with pytest.raises(DataError, match="302"):
        open_url(f"{server.url}/b.tar")


def test_passwords_and_signatures_are_sent_but_never_shown(server):
    server.always["/b.tar"] = Answer(302, to=f"http://localhost:{server.host.partition(':')[2]}/a.tar")
    url = f"http://me:hush@{server.host}"
    with open_url(f"{url}/a.tar?token=hush") as stream:
        stream.read()
    assert server.headers["Authorization"] == "Basic bWU6aHVzaA=="
    open_url(f"{url}/b.tar").close()
    assert "Authorization" not in server.headers, "the password is not for whom the server points to"
    for path in ("/nothing.tar?token=hush", "/a b\x00.tar?token=hush", ":hush"):
        with pytest.raises(DataError) as error:
            open_url(url + path)
        assert "hush" not in str(error.value).replace(f"{server.host}:hush", "")
    assert shown("pipe:curl -H hush https://x/y") == "pipe:curl ..."


def test_a_command_runs_only_when_it_was_asked_for(tmp_path, target, monkeypatch):
    monkeypatch.setattr(remote, "WAITS", ())
    monkeypatch.delenv("PROCAP_ALLOW_PIPE", raising=False)
    (tmp_path / "a").write_bytes(BYTES)
    command = f"pipe:touch {tmp_path}/ran; cat {tmp_path}/a"
    with pytest.raises(DataUsageError, match="PROCAP_ALLOW_PIPE=1"):
        download(command, target)
    assert not (tmp_path / "ran").exists()
    monkeypatch.setenv("PROCAP_ALLOW_PIPE", "1")
    download(command, target, sha256=SHA256)
    assert target.read_bytes() == BYTES and (tmp_path / "ran").exists()
    with pytest.raises(DataError) as error:
        download("pipe:echo hush; exit 3", target.with_name("b"))
    assert one_line(error.value, "pipe:echo") and "hush" not in str(error.value)
    assert not target.with_name("b").exists()


def test_addresses_nothing_opens_are_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "WAITS", ())
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataUsageError, match="nothing:// is not an address"):
        open_url("nothing://bucket/a.tar")
    with pytest.raises(DataError, match=r"gs://bucket/a\.tar needs a package .*: pip install gcsfs"):
        open_url("gs://bucket/a.tar")
    with pytest.raises(DataError, match=r"hf://datasets/nobody/nothing/a\.tar cannot be opened"):
        open_url("hf://datasets/nobody/nothing/a.tar")


def test_no_room_on_the_disk_is_said_before_anything_is_written(server, target, monkeypatch):
    usage = shutil.disk_usage(server.folder)
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda path: usage._replace(free=2**20))
    with pytest.raises(DataError, match=r"does not fit into .*: 2 MiB to download, 1 MiB free"):
        download(f"{server.url}/a.tar", target)
    assert names(target.parent) == []


def test_a_folder_that_cannot_be_written_is_one_line(server, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        download(f"{server.url}/a.tar", tmp_path / "file" / "a.tar")


def test_threads_fetch_a_file_once(server, target):
    server.always["/a.tar"] = Answer(wait=0.1)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: download(f"{server.url}/a.tar", target, sha256=SHA256), range(8)))
    assert len(server.asked) == 1 and names(target.parent) == ["a.tar"] and target.read_bytes() == BYTES


def test_processes_of_a_machine_fetch_a_file_once(server, target):
    server.always["/a.tar"] = Answer(wait=0.5)
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=download, args=(f"{server.url}/a.tar", target)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert len(server.asked) == 1 and target.read_bytes() == BYTES and names(target.parent) == ["a.tar"]


def test_who_waited_for_a_failed_download_tries_itself(server, target):
    server.answers["/a.tar"] = [Answer(404, wait=0.2)]

    def attempt(_: int) -> str:
        try:
            download(f"{server.url}/a.tar", target, sha256=SHA256)
            return "there"
        except DataError:
            return "failed"

    with ThreadPoolExecutor(3) as pool:
        assert sorted(pool.map(attempt, range(3))) == ["failed", "there", "there"]
    assert names(target.parent) == ["a.tar"]


def test_a_file_system_without_locks_is_no_obstacle(server, target, monkeypatch):
    monkeypatch.setattr(fetch, "lock", lambda stream: False)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: download(f"{server.url}/a.tar", target, sha256=SHA256), range(4)))
    assert target.read_bytes() == BYTES
    assert [name for name in names(target.parent) if target.with_name(name).stat().st_size] == ["a.tar"]


def test_urls_are_told_from_paths_and_named_one_way():
    assert is_url("https://x/y") and is_url("gs://x") and is_url("pipe:cat x") and is_url("file:///x")
    assert not is_url("data/x") and not is_url("/x:y/z") and not is_url("C:\\data")
    repository = "https://huggingface.co/datasets/clip-benchmark/wds_cars"
    for page in (f"{repository}/tree/main", f"{repository}/tree/main/", f"{repository}/resolve/main", repository):
        assert canonical(page) == f"{repository}/resolve/main"
    assert canonical(f"{repository}/tree/v2/test") == f"{repository}/resolve/v2/test"
    assert (
        canonical("https://huggingface.co/datasets/a/b/tree/main?x=1")
        == "https://huggingface.co/datasets/a/b/resolve/main?x=1"
    )
    assert join("https://x/y/?sig=1", "test/0 .tar") == "https://x/y/test/0%20.tar?sig=1"
    assert join("gs://x/y/", "test/0.tar") == "gs://x/y/test/0.tar"
    with pytest.raises(DataUsageError, match="not a usable URL"):
        canonical("http://[::1/x")


def test_fetching_needs_no_heavy_library():
    code = "import sys, shards.fetch; print({'torch', 'webdataset', 'PIL', 'huggingface_hub'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"
