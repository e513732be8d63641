"""Take files of the Hugging Face Hub, or of its cache; a failure says why, within seconds."""

from __future__ import annotations

from pathlib import Path

from procap.errors import NotFound, Unreachable, UserError

ANSWER_SECONDS = 6.0


def hub_file(repository: str, *names: str, revision: str | None = None, offline: bool = False) -> Path:
    """Return the first of the files `names` that a repository has; that of the cache if `offline` or without an answer.

    Raises NotFound for a repository or file that is not there or not open to this user, Unreachable without an answer.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError

    for name in names:
        url = hf_hub_url(repository, name, revision=revision)
        try:
            if not offline:
                # The download itself would ask six times.
                get_hf_file_metadata(url, timeout=ANSWER_SECONDS)
            return Path(hf_hub_download(repository, name, revision=revision, local_files_only=offline))
        except (LocalEntryNotFoundError, RemoteEntryNotFoundError):
            continue
        # The errors of the library and of its client have no class in common.
        except Exception as error:
            cached = try_to_load_from_cache(repository, name, revision=revision)
            if not isinstance(cached, str):
                raise _explain(error, repository, url) from error
            return Path(cached)
    missing = f"{repository} has no file {names[0]} (404)"
    raise NotFound(f"the Hugging Face cache has no {names[0]} of {repository}" if offline else missing)


def _explain(error: Exception, repository: str, url: str) -> UserError:
    """Say why the Hub does not give the file at `url`."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 404:
        return NotFound(f"{url} is not there: no repository {repository} (404); check the name")
    if status in (401, 403):
        access = "accept its terms there if it is gated, and name a token with `hf auth login` or $HF_TOKEN"
        return NotFound(f"{url} is not open to this user ({status}), or does not exist: {access}")
    proxy = "the proxy does not answer; check $HTTPS_PROXY: " * ("Proxy" in type(error).__name__)
    return Unreachable(f"{url} cannot be reached ({proxy}{' '.join(str(error).split())[:160] or type(error).__name__})")
