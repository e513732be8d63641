"""Make links from the documentation site to files of the repository, which the site does not have; a hook of mkdocs."""

import posixpath
import re
from typing import Any


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Replace relative links that leave `docs/` by those at the address of the repository; without one they stay."""

    def replace(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), match[1]))
        return match[0] if path.startswith("docs/") else f"]({config.repo_url}/blob/main/{path})"

    return re.sub(r"\]\((\.\./[^)]+)\)", replace, markdown) if config.repo_url else markdown
