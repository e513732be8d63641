"""Remote files: whole or not at all, one download per machine, and errors that name the URL without its secrets."""

import hashlib
import logging
import multiprocessing
import os
import resource
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest
from fsspec import AbstractFileSystem, asyn
from local_server import Answer, LocalServer

from procap.errors import NotFound, Unreachable, UsageError, UserError
from runner.remote_results import results_root
from shards import remote
from shards.credentials import mask
from shards.default_paths import data_root
from shards.remote import delete, download, list_files, read_file, read_files, upload
from shards.urls import canonical, is_url, join, redact

BYTES = bytes(range(256)) * 9000
SHA256 = hashlib.sha256(BYTES).hexdigest()


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    (tmp_path / "www").mkdir()
    (tmp_path / "www" / "a.tar").write_bytes(BYTES)
    with LocalServer(tmp_path / "www") as running:
        yield running


@pytest.fixture
def target(tmp_path):
    return tmp_path / "here" / "a.tar"


def names(folder):
    return sorted(os.listdir(folder))


def is_one_line(error: BaseException, *words: str) -> bool:
    text = str(error)
    return "\n" not in text and all(word in text for word in words)


def test_a_download_is_not_repeated(server, target):
    download(f"{server.url}/a.tar", target, sha256=SHA256)
    assert target.read_bytes() == BYTES and names(target.parent) == ["a.tar"]
    download(f"{server.url}/a.tar", target, sha256=SHA256)
    assert len(server.asked) == 1


def test_paths_and_file_urls_need_no_server(tmp_path, target):
    odd = tmp_path / "a b#c?d%::e.tar"
    odd.write_bytes(BYTES)
    for url in (str(odd), "file://" + str(odd).replace("%", "%25").replace(" ", "%20").replace("#", "%23")):
        assert read_file(url) == BYTES
    (tmp_path / "a b%20#1").mkdir()
    (tmp_path / "a b%20#1" / "x.json").write_bytes(b"x")
    for folder in (tmp_path / "a b%20#1", (tmp_path / "a b%20#1").as_uri()):
        assert read_files(str(folder), ["x.json", "absent.json"]) == {"x.json": b"x"}
    download(str(odd), target, sha256=SHA256)
    assert target.read_bytes() == BYTES
    with pytest.raises(NotFound, match=r"nothing\.tar is not there"):
        read_file(str(tmp_path / "nothing.tar"))
    with pytest.raises(UsageError, match="another machine"):
        read_file("file://elsewhere/a.tar")


def test_a_file_with_a_different_digest_is_refused_and_not_kept(server, target):
    target.parent.mkdir()
    target.write_bytes(b"older")
    with pytest.raises(UserError) as error:
        download(f"{server.url}/a.tar", target, sha256="0" * 64)
    assert is_one_line(error.value, f"{server.url}/a.tar is not the expected file", "0" * 64)
    assert names(target.parent) == ["a.tar"] and target.read_bytes() == b"older"


def test_a_server_that_keeps_breaking_off_leaves_nothing(server, target):
    server.always["/a.tar"] = Answer(cut=100_000)
    with pytest.raises(Unreachable, match=r"/a\.tar cannot be reached"):
        download(f"{server.url}/a.tar", target)
    assert names(target.parent) == []


@pytest.mark.parametrize("status, reason, words", [
    (404, None, "is not there"),
    (403, None, "not open to this machine"),
    (400, "caf\xe9", "the server answers 400"),
    (503, None, "the server answers 503"),
])  # fmt: skip
def test_an_answer_that_refuses_is_one_line(server, target, status, reason, words):
    server.always["/a.tar"] = Answer(status, reason=reason)
    with pytest.raises(UserError) as error:
        download(f"{server.url}/a.tar", target)
    assert is_one_line(error.value, f"{server.url}/a.tar", words)
    assert names(target.parent) == [] and str(error.value).encode()


def test_a_missing_host_or_server_is_one_line(server, target):
    with socket.socket() as held:
        # Bound, so that no other program gets the port, and not listening.
        held.bind(("127.0.0.1", 0))
        for url in (f"http://127.0.0.1:{held.getsockname()[1]}/a.tar", "http://no-such-host.invalid/a.tar"):
            with pytest.raises(Unreachable) as error:
                download(url, target)
            assert is_one_line(error.value, url, "cannot be reached")


def test_redirects_are_followed_to_http_only(server, tmp_path):
    (tmp_path / "secret").write_text("secret")
    for to in (f"file://{tmp_path}/secret", "ftp://127.0.0.1/a.tar"):
        server.always["/b.tar"] = Answer(302, to=to)
        with pytest.raises(UserError) as error:
            read_file(f"{server.url}/b.tar")
        assert is_one_line(error.value, f"{server.url}/b.tar", "cannot be reached")
    server.always["/b.tar"] = Answer(302, to=f"{server.url}/a.tar")
    assert read_file(f"{server.url}/b.tar") == BYTES
    server.always["/b.tar"] = Answer(302, to=f"{server.url}/b.tar")
    with pytest.raises(UserError, match="cannot be reached"):
        read_file(f"{server.url}/b.tar")


def test_passwords_and_signatures_are_sent_but_never_printed(server):
    server.always["/b.tar"] = Answer(302, to=f"http://localhost:{server.host.partition(':')[2]}/a.tar")
    url = f"http://me:hush@{server.host}"
    read_file(f"{url}/a.tar?token=hush")
    assert server.headers["Authorization"] == "Basic bWU6aHVzaA=="
    read_file(f"{url}/b.tar")
    assert "Authorization" not in server.headers, "the password is not for the server of the redirect"
    for path in ("/nothing.tar?token=hush", "/a b\x00.tar?token=hush", ":hush"):
        with pytest.raises(UserError) as error:
            read_file(url + path)
        assert "hush" not in str(error.value).replace(f"{server.host}:hush", "")
    with pytest.raises(UsageError, match="put credentials into the environment") as error:
        read_file("s3://key:hush@bucket/a.tar")
    assert "hush" not in str(error.value)


def test_on_a_full_disk_nothing_is_kept(server, target):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A limit on file sizes stands for a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            download(f"{server.url}/a.tar", target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(target.parent) == []
    (target.parent / "file").write_text("")
    with pytest.raises(UserError, match=r"file: (Not a directory|File exists); name another folder"):
        download(f"{server.url}/a.tar", target.parent / "file" / "a.tar")


def test_processes_and_threads_of_a_machine_download_a_file_once(server, target):
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=download, args=(f"{server.url}/a.tar", target)) for _ in range(2)]
    for worker in workers:
        worker.start()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: download(f"{server.url}/a.tar", target), range(4)))
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert len(server.asked) == 1 and target.read_bytes() == BYTES and names(target.parent) == ["a.tar"]


def test_an_object_store_is_written_listed_and_read(s3, target):
    import s3fs

    url, data = f"s3://{s3.bucket}/files", os.urandom(11 * 2**20)
    target.parent.mkdir()
    target.write_bytes(data)
    upload(target, f"{url}/big/a.tar")
    upload(b"b", f"{url}/b.txt")
    assert sorted(list_files(url)) == ["b.txt", "big/a.tar"] and list_files(f"{url}/big") == ["a.tar"]
    upload(b"c", f"{url}/b.txt")
    assert read_files(url, ["b.txt", "absent"]) == {"b.txt": b"c"}
    assert read_file(f"{url}/big/a.tar") == data
    target.unlink()
    download(f"{url}/big/a.tar", target, sha256=hashlib.sha256(data).hexdigest())
    delete(f"{url}/b.txt")
    delete(f"{url}/b.txt")
    assert list_files(url) == ["big/a.tar"]
    # Without the cache of listings of this process, as another machine does.
    s3fs.S3FileSystem(skip_instance_cache=True).pipe_file(f"{s3.bucket}/files/c.txt", b"c")
    assert read_file(f"{url}/c.txt") == b"c"


def test_an_object_store_names_what_is_missing(s3, monkeypatch):
    import s3fs

    with pytest.raises(NotFound, match=r"s3://results/data/absent\.tar is not there"):
        read_file(f"s3://{s3.bucket}/data/absent.tar")
    with pytest.raises(NotFound, match=r"s3://no-such-bucket/a\.tar is not there"):
        read_file("s3://no-such-bucket/a.tar")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    # A process reads the settings of its machine once.
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        with pytest.raises(Unreachable, match=r"s3://results/data/a\.tar cannot be reached \(.*\); try again later"):
            read_file(f"s3://{s3.bucket}/data/a.tar")
    finally:
        s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def fresh_s3(s3):
    """An S3 whose settings a test may change: a process reads them at its first request."""
    from s3fs import S3FileSystem

    S3FileSystem.clear_instance_cache()
    yield s3
    S3FileSystem.clear_instance_cache()


def test_missing_credentials_are_what_to_check(fresh_s3, monkeypatch, tmp_path):
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.delenv(f"AWS_{name}")
    for name in ("CONFIG_FILE", "SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(f"AWS_{name}", str(tmp_path / "absent"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(Unreachable, match=r"\(Unable to locate credentials\); check the credentials$"):
        read_file(f"s3://{fresh_s3.bucket}/a.tar")


@pytest.mark.parametrize(("driver", "url"), [
    ("gcsfs.retry", "gs://lab/a.tar"), ("azure.identity", "abfs://lab@account.dfs.core.windows.net/a.tar"),
])  # fmt: skip
def test_drivers_of_other_stores_log_nothing_beside_the_error(monkeypatch, caplog, driver, url):
    """Both log why they have no credentials, on dozens of lines."""

    class Store(AbstractFileSystem):
        def open(self, path, *given, **more):
            logging.getLogger(driver).error("no credentials", stack_info=True)
            raise RuntimeError("no credential in this chain")

    monkeypatch.setattr(fsspec, "url_to_fs", lambda url: (Store(), url))
    with pytest.raises(Unreachable, match=r"\(no credential in this chain\); check the credentials$"):
        read_file(url)
    assert not caplog.records


def test_a_request_without_an_answer_is_repeated_as_often_as_the_settings_say(fresh_s3, monkeypatch):
    from s3fs import S3FileSystem

    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        monkeypatch.setattr(S3FileSystem, "read_timeout", 0.2)
        with pytest.raises(Unreachable, match=r"cannot be reached \(Read timeout .*\); try again later$"):
            read_file(f"s3://{fresh_s3.bucket}/a.tar")
        silent.setblocking(False)
        silent.accept()[0].close()
        with pytest.raises(BlockingIOError):
            silent.accept()


@pytest.fixture
def endless(monkeypatch):
    """An object store whose objects do not end."""
    import s3fs

    class Endless(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "10")
            self.end_headers()

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(2**60))
            self.end_headers()
            with suppress(OSError):
                while True:
                    self.wfile.write(bytes(2**20))

        def log_message(self, *args):
            pass

    store = ThreadingHTTPServer(("127.0.0.1", 0), Endless)
    store.daemon_threads = True
    threading.Thread(target=store.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    variables = {"ACCESS_KEY_ID": "test", "SECRET_ACCESS_KEY": "not-a-secret", "DEFAULT_REGION": "us-east-1"}
    for name, value in {**variables, "ENDPOINT_URL": f"http://127.0.0.1:{store.server_address[1]}"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    s3fs.S3FileSystem.clear_instance_cache()
    # In this mode asyncio refuses calls of its objects from another thread than that of the loop.
    asyn.get_loop().set_debug(True)
    yield
    asyn.get_loop().set_debug(False)
    s3fs.S3FileSystem.clear_instance_cache()
    store.shutdown()
    store.server_close()


@pytest.mark.parametrize("read", [
    lambda target: read_file("s3://results/a.json", 10**6),
    lambda target: download("s3://results/a.json", target, limit=10**6),
    lambda target: read_files("s3://results", ["a.json"]),
])  # fmt: skip
def test_an_object_without_an_end_is_refused_in_one_line(endless, target, monkeypatch, read):
    monkeypatch.setattr(remote, "DOCUMENT_BYTES", 10**6)
    with pytest.raises(
        UserError, match=r"^s3://results/a\.json is not the expected file: it has more than 1,000,000 bytes$"
    ):
        read(target)


def test_urls_are_recognized_and_normalized():
    assert canonical("https://x/y/?a=1#b") == "https://x/y?a=1" and canonical("gs://x/") == "gs://x"
    assert is_url("https://x/y") and is_url("gs://x") and is_url("file:///x")
    assert not is_url("data/x") and not is_url("/x:y/z") and not is_url("C:\\data")
    assert join("https://x/y/?sig=1", "test/0 .tar") == "https://x/y/test/0%20.tar?sig=1"
    assert join("gs://x/y/", "test/0.tar") == "gs://x/y/test/0.tar"
    with pytest.raises(UsageError, match="not a usable URL"):
        canonical("http://[::1/x")


@pytest.mark.parametrize("text", ["s3:/lab/results", "https:/host/x", "file:/data", "simplecache::s3://lab/x"])
def test_a_url_that_would_become_a_folder_is_refused(text, tmp_path):
    for open_root in (data_root, lambda text: results_root(text, tmp_path)):
        with pytest.raises(UsageError, match=r"^\w+:[/:]\.\.\. is no URL: a URL has two slashes there, as s3://"):
            open_root(text)
    assert data_root(f"./{text}") == Path(text) and data_root("/x:/y") == Path("/x:/y")


def test_the_container_in_an_azure_url_is_no_user():
    url = "abfs://container@account.dfs.core.windows.net/shards"
    assert redact(url) == url and redact(url.replace("@", ":key@")) == url.replace("container@", "")


HUSH = "hush-Hush.12"


@pytest.mark.parametrize(("text", "masked"), [
    (f"http://me:{HUSH}@host/x", "http://host/x"),
    (f"postgresql+psycopg2://me:{HUSH}@db/mlflow", "postgresql+psycopg2://db/mlflow"),
    (f"https://host/x?a=1&X-Amz-Signature={HUSH}&b=2", "https://host/x?a=1&X-Amz-Signature=***&b=2"),
    (f"abfs://me:{HUSH}@host/x", "abfs://host/x"),
    (f"https://host/x?sv=2&sig={HUSH}", "https://host/x?sv=2&sig=***"),
    (f"a {HUSH} in /run/hidden", "a *** in /run/hidden"),
    *((text, text) for text in (
        "torch bearer relay",
        "token=cls",
        "Authorization: Bearer cls",
        "see http://host:8080/x@y now",
        "s3://bucket/a@b",
        "abfs://container@account.dfs.core.windows.net/shards",
        "https://drive.google.com/uc?id=3&export=download",
        "deep_tokens=independent n_session_tokens=4 sort_key = lambda x",
        '{"key": "value", "accuracy": 93.2}',
    )),
])  # fmt: skip
def test_users_signatures_and_secret_variables_are_masked_and_nothing_else(text, masked, monkeypatch):
    monkeypatch.setenv("LAB_TOKEN", HUSH)
    monkeypatch.setenv("LAB_KEY", "/run/hidden")
    assert mask(text) == masked


@pytest.mark.parametrize("read", [
    lambda url, target: read_file(url),
    lambda url, target: download(url, target, sha256=SHA256),
    lambda url, target: read_files(url.removesuffix("/a.tar"), ["a.tar"]),
])  # fmt: skip
def test_an_answer_that_ends_early_is_asked_for_again(server, target, read):
    server.answers["/a.tar"] = [Answer(cut=1000), Answer(cut=0)]
    read(f"{server.url}/a.tar", target)
    assert len(server.asked) == 3
