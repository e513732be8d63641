"""`procap table`: the results below a folder as one table."""

from __future__ import annotations

from benchmarks.flags import Output, Selection
from benchmarks.output import note, quoted, show, show_json
from benchmarks.scores import read_scores, run_folders
from benchmarks.selection import chooser, results_at
from benchmarks.table_formats import FORMATS, as_json, render
from benchmarks.tables import build_table
from procap.errors import UserError, unknown_name


def table(selection: Selection, results: str, form: str, output: Output) -> int:
    """See `procap table --help`."""
    if form not in FORMATS:
        raise unknown_name("format", form, FORMATS)
    root = results_at(results)
    scores = read_scores(root, chooser(selection, lambda: (config.dataset for _, config in run_folders(root))))
    if not scores:
        listing = f"procap ls runs --results {quoted(results)}"
        raise UserError(f"no evaluated run below {results} fits; see `{listing}`, evaluate with `procap eval`")
    made = build_table(scores)
    show(render(made, form))
    if form == "csv":
        for line in made.notes:
            note(line)
    if output.json and form != "json":
        show_json(as_json(made))
    return 0
