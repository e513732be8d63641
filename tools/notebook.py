"""Execute the notebook of the examples and store its outputs: python -m tools.notebook.

It needs `pip install nbconvert ipykernel` in the environment of the project.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from shards.files import write_file

NOTEBOOK = Path(__file__).parents[1] / "examples" / "quickstart.ipynb"


def digest_code(notebook: dict[str, Any]) -> str:
    """Return the SHA-256 of all code cells; outputs that were stored for other code are out of date."""
    code = ("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    return hashlib.sha256("\n\n".join(code).encode()).hexdigest()


def execute(file: Path) -> None:
    """Execute a notebook in an empty folder, and write it with outputs and the digest of its code."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / file.name
        copy.write_bytes(file.read_bytes())
        command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", "--inplace", str(copy)]
        subprocess.run(command, cwd=folder, check=True)
        notebook = json.loads(copy.read_bytes())
    for cell in notebook["cells"]:
        # Times of execution, and random names of cells.
        cell["metadata"] = {}
        cell.pop("id", None)
    notebook["metadata"] = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "procap": {"code": digest_code(notebook)},
    }
    notebook["nbformat_minor"] = 4
    write_file(file, json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    execute(NOTEBOOK)
