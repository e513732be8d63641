"""Write the table of the ledger's entries into its page: python -m tools.ledger."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from runner.ledger import LedgerEntry
from shards.files import write_file
from shards.uneven_samples import BALANCED

LEDGER = Path(__file__).parents[1] / "docs" / "results" / "ledger"
PAGE = LEDGER / "README.md"
TABLE = re.compile(r"(?<=<!-- made by python -m tools.ledger -->\n).*?(?=<!-- end -->)", re.DOTALL)
HEADERS = ("data set", "method", "training", "correct of all", "device, program")


def read_entries(folder: Path = LEDGER) -> dict[str, LedgerEntry]:
    """Read all entries by file name. Raises pydantic.ValidationError for a file that is none."""
    return {file.name: LedgerEntry.model_validate_json(file.read_bytes()) for file in sorted(folder.glob("*.json"))}


def make_table(entries: Sequence[LedgerEntry]) -> str:
    """Make a Markdown table with a row for each run."""
    rows = [HEADERS, tuple("---" for _ in HEADERS)]
    for entry in sorted(entries, key=lambda entry: (entry.dataset, entry.method, entry.backbone, entry.seed)):
        counts = "<br>".join(
            f"{count.target}: {count.correct} of {count.total}, {100 * count.correct / count.total:.2f} %"
            for count in entry.counts
        )
        source = "imported" if entry.imported else f"{entry.recipe} recipe"
        source += ", from a finished run" if entry.init_digest else ""
        shots = f"{entry.shots} shots" if entry.shots else "all images"
        shots += f" ({entry.sampling})" if entry.sampling != BALANCED else ""
        training = f"{entry.backbone}, {entry.classes} classes, {shots}<br>seed {entry.seed}, {source}"
        name = f"[{entry.method}]({entry.file})"
        rows.append((entry.dataset, name, training, counts, f"{entry.device}<br>{entry.program}"))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def fill_page(page: str, entries: Sequence[LedgerEntry]) -> str:
    """Return the text of the page with the table of these entries."""
    table = make_table(entries)
    return TABLE.sub(lambda _: table, page)


if __name__ == "__main__":
    write_file(PAGE, fill_page(PAGE.read_text(encoding="utf-8"), [*read_entries().values()]))
