"""The boundary of the command line: what it refuses to read as arguments, and what it never prints."""

from __future__ import annotations

import io
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from local_server import Answer, LocalServer
from pydantic import ValidationError

from benchmarks.cli import main
from benchmarks.cli.flags import RuntimeFlags, command_line
from benchmarks.console.errors import one_line
from benchmarks.console.output import OutputStream, csv_text, note, show
from runner.config import RunConfig, plan_run
from shards.errors import DataUsageError
from shards.image_files import find_images

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("place", ["ls", "runs", "--results=", "value"])
@pytest.mark.parametrize("text", ["a\nb", "a\tb", "\x1b[31mred", "caf\udce9", "a\u2028b"])
def test_control_characters_in_an_argument_are_refused(
    place: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = {"ls": [text], "runs": ["ls", text], "--results=": ["table", f"--results={text}"]}
    assert main(lines.get(place, ["train", "--option", f"template={text}", "--results", "r"])) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and err.isascii() and "has a control character" in err
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["HOME", "PROCAP_DATA", "MLFLOW_TRACKING_URI", "folder"])
def test_control_characters_in_the_environment_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = tmp_path / "a\nb"
    odd.mkdir()
    monkeypatch.chdir(odd) if name == "folder" else monkeypatch.setenv(name, str(odd))
    assert main(["ls", "runs"]) == 2 and name in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["device", "pipe", "socket"])
@pytest.mark.parametrize(
    "line",
    ["predict run {}", "predict run images --out {}", "sweep {}", "import {} --method maple", "data pack {}",
     "train --deepspeed-config={}", "train --option sentences={}", "table --results {}", "export {}"],
)  # fmt: skip
def test_devices_pipes_and_sockets_are_refused(
    line: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reading one might not end, and writing a file would replace it."""
    path = Path("/dev/null") if kind == "device" else tmp_path / "odd"
    if kind == "pipe":
        os.mkfifo(path)
    with closing(socket.socket(socket.AF_UNIX)) as opened:
        if kind == "socket":
            opened.bind(str(path))
        assert main(line.format(path).split()) == 2
    assert f"{path} is a device, a pipe or a socket: name a file or a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    ["demo --out {}", "predict {} photo.png", "export {}", "import {} --method coop", "sweep {}",
     "data pack shapes --data {}", "train --pretrained={}", "table --results {}"],
)  # fmt: skip
def test_a_url_in_the_place_of_a_folder_is_refused_without_its_secrets(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(line.format("http://me:hush@127.0.0.1:9/x?k=hush").split()) == 2
    out, err = capsys.readouterr()
    assert "http://127.0.0.1:9/x" in err and err.count("\n") == 1 and "hush" not in out + err
    assert not any(tmp_path.iterdir())


def test_credentials_are_masked_in_all_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import benchmarks.cli.ls

    def fail() -> None:
        print("listed http://me:hush@host/x")
        print("logged api_key=hush", file=sys.stderr)
        raise RuntimeError("no answer from https://host/x?token=hush with Authorization: Bearer hush")

    monkeypatch.setattr(benchmarks.cli.ls, "_methods", fail)
    assert main(["ls", "methods", "-v"]) == 1
    out, err = capsys.readouterr()
    assert out == "listed http://host/x\n" and "logged api_key=***\n" in err
    assert "Traceback" in err and "https://host/x?token=***" in err and "hush" not in err


def test_commands_to_repeat_have_no_credentials() -> None:
    flags = RuntimeFlags(
        "https://me:hush@host/d?k=hush", results="a b", tracking="postgresql://u:hush@db/x?password=hush"
    )
    assert command_line(flags) == "--data https://host/d --results 'a b' --tracking postgresql://db/x"


@pytest.mark.parametrize("flag", ["--option", "--recipe-field"])
@pytest.mark.parametrize("text", ["token=hush", "maple.api_key=hush", "ctx_init=hf_abcdefghijklmnopqrstuvwx"])
@pytest.mark.parametrize("command", ["train", "submit --dry-run -- train --data /d --results /r"])
def test_a_credential_as_an_option_is_refused(
    command: str, flag: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*command.split(), "--methods", "maple", "--datasets", "shapes", flag, text]
    assert main(words) == 2
    err = capsys.readouterr().err
    assert "credential" in err and err.count("\n") == 1 and "hush" not in err and "hf_" not in err


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("ascii", '^ 75 +- 1 + -> "\\u4e2d" \\udce9\n'), ("latin-1", "^ 75 ± 1 + -> \"\\u4e2d\" \\udce9\n"),
     ("utf-8", "↑ 75 ± 1 † → “中” \\udce9\n")],
)  # fmt: skip
def test_a_terminal_gets_what_its_encoding_has(encoding: str, shown: str) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    print("↑ 75 ± 1 † → “中” \udce9", file=OutputStream(terminal), flush=True)  # type: ignore[arg-type]
    assert terminal.buffer.getvalue().decode(encoding) == shown  # type: ignore[attr-defined]


def test_messages_and_results_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert one_line("a\n b \x1b[2J \u202e c") == r"a b \x1b[2J \u202e c"
    show("a\n b \x1b[2J\x9b")
    note("c\r\td")
    assert capsys.readouterr() == ("a\n b \\x1b[2J\\x9b\n", "c\\r\td\n")


@pytest.mark.parametrize("field", ["dataset", "method", "backbone"])
@pytest.mark.parametrize("name", ["..", "../../outside/x/..", "a\x1b[2Jb", ""])
def test_a_configuration_from_outside_cannot_leave_the_results(field: str, name: str) -> None:
    plain = plan_run(method="coop", dataset="digits").model_dump()
    with pytest.raises(ValidationError, match=f"{field}[\\s\\S]*cannot be the name of a folder"):
        RunConfig.model_validate({**plain, field: name})


@pytest.mark.parametrize("name", ["a\nb.png", "a\x1b[2J.png", "caf\udce9.png"])
def test_an_image_whose_name_controls_the_terminal_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(DataUsageError, match="has a control character or is not UTF-8: rename it") as caught:
        list(find_images([tmp_path]))
    assert str(caught.value).isascii()


@pytest.mark.parametrize("text", ["=1+1", "@SUM(A1)", "+cmd", "-2+3+cmd|' /C calc'!A0", "- x", "\t=1"])
def test_a_formula_in_a_csv_file_is_quoted(text: str) -> None:
    assert csv_text(text) == f"'{text}"


@pytest.mark.parametrize("text", ["-1.5", "+0.3", "-1e-3", "-", "--", "-0.30 ± 0.10", "-inf", "a=b", "", "75.0"])
def test_numbers_in_a_csv_file_stay_numbers(text: str) -> None:
    assert csv_text(text) == text


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", ">&-"])
def test_closed_streams_do_not_stop_a_command(closed: str, tmp_path: Path) -> None:
    """A file that is written meanwhile must not get the number of a closed stream."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom benchmarks.console.output import open_streams, note, show\n"
        f"open_streams()\nwith open({str(tmp_path / 'file')!r}, 'w') as file:\n"
        "    show('shown'); note('noted'); file.write('kept')\n"
    )
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(code)} {closed}"
    assert subprocess.run(["bash", "-c", command], cwd=ROOT, timeout=600).returncode == 0
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("command", ["train --methods coop", "eval --methods zeroshot"])
def test_sigterm_ends_a_wait_for_a_server_at_once(
    command: str, few_digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Images are read inside the loops over steps and batches, which finish a step before they end."""
    monkeypatch.setenv("PROCAP_HOME", str(tmp_path / "home"))
    place = ["--datasets", "digits", "--shots", "1", "--results", str(tmp_path / "results"), "--tracking", "off"]
    assert main(["train", "--methods", "zeroshot", *place, "--data", str(few_digits)]) == 0
    with LocalServer(few_digits) as server:
        server.always = {f"/digits/{split}/0.tar": Answer(wait=20.0) for split in ("train", "test")}
        sent: list[float] = []

        def stop() -> None:
            deadline = time.monotonic() + 60
            while not server.paths(".tar") and time.monotonic() < deadline:
                time.sleep(0.05)
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=stop).start()
        code = main([*command.split(), *place, "--data", server.url])
        assert time.monotonic() - sent[0] < 5 and code == 143
    assert "procap: SIGTERM: stopped" in capsys.readouterr().err.splitlines()[-1]
