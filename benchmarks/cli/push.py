"""`procap push`: publish a trained run on the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from benchmarks.cli import flags
from benchmarks.cli.selection import find_run, runtime_config
from benchmarks.console.output import columns, note, show, show_json
from runner.session import Session


@flags.command(
    "procap push results/base/shapes/maple/mini/16shot/seed1-3fa29c10 --to my-lab/maple-shapes --dry-run",
    "procap push 3fa29c10 --to my-lab/maple-shapes",
)
def push(
    run: Annotated[Path, flags.run_argument("folder of a run, or start of its hash")],
    to: Annotated[str, flags.flag("NAMESPACE/NAME", "repository; it is created if needed")],
    private: Annotated[bool, flags.switch("--private", "create a private repository")] = False,
    dry_run: flags.DryRun = False,
    results: flags.Results = "results",
) -> int:
    """Publish a trained run on the Hugging Face Hub, with a model card of its measured accuracies.

    The token is that of `hf auth login` or $HF_TOKEN. `procap eval hf://NAMESPACE/NAME` evaluates the run elsewhere.
    """
    selected = find_run(run, Session(runtime_config(flags.StorageFlags(results=results))))
    # This imports torch, which a wrong name need not wait for.
    from runner.hub import push_files, shared_files

    files = shared_files(selected, to)
    sizes = {name: len(content) for name, content in files.items()}
    show(columns(("file", "bytes"), [(name, f"{size:,}") for name, size in sizes.items()]))
    url = None if dry_run else push_files(files, to, private=private)
    note("nothing was uploaded" if dry_run else f"uploaded {selected.path} to {url}")
    show_json({"run": selected.path, "to": to, "files": sizes, "commit": url})
    return 0
