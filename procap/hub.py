"""Take files of the Hugging Face Hub from its cache, or download them; a failure says why, within seconds."""

from __future__ import annotations

from pathlib import Path

from procap.errors import NotFound, Unreachable, UserError

ANSWER_SECONDS = 6.0


def hub_file(repository: str, *names: str, revision: str | None = None, offline: bool = False) -> Path:
    """Return the first of the files `names` that the cache or, unless `offline`, the repository has.

    Raises NotFound for a repository or file that is not there or not open to this user, Unreachable without an answer.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError

    url, error = "", UserError(f"the Hugging Face cache has no {names[0]} of {repository}")
    for name in names:
        try:
            return Path(hf_hub_download(repository, name, revision=revision, local_files_only=True))
        except LocalEntryNotFoundError:
            if offline:
                continue
        url = hf_hub_url(repository, name, revision=revision)
        try:
            # The download itself would try six times.
            get_hf_file_metadata(url, timeout=ANSWER_SECONDS)
            return Path(hf_hub_download(repository, name, revision=revision))
        except RemoteEntryNotFoundError:
            error = NotFound(f"{url} is not there: {repository} has no such file (404)")
        # The library has no class for all of its own errors and those of its client.
        except Exception as failure:
            raise _explain(failure, repository, url) from failure
    raise error


def _explain(error: Exception, repository: str, url: str) -> UserError:
    """Say why the Hub does not give the file at `url`."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    reason = " ".join(str(error).split())[:160] or type(error).__name__
    if isinstance(error, OSError) and error.filename:
        # A full or read-only disk.
        return UserError(f"{error.filename}: {error.strerror}")
    if status in (401, 403):
        access = "accept its terms there if it is gated, and name a token with `hf auth login` or $HF_TOKEN"
        return NotFound(f"{url} is not open to this user ({status}), or does not exist: {access}")
    if status == 404:
        return NotFound(f"{url} is not there: no repository {repository} (404); check the name")
    if "Proxy" in type(error).__name__:
        return Unreachable(f"{url} cannot be reached: the proxy does not answer ({reason}); check $HTTPS_PROXY")
    return Unreachable(f"{url} cannot be reached ({reason})")
