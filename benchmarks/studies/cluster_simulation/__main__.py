"""The paper's Table 1 on clusters of several sizes, simulated.

    python -m benchmarks.studies.cluster_simulation                           the paper's Table 1 on 1 to 512 GPUs
    python -m benchmarks.studies.cluster_simulation --mtbf-hours 24           on nodes that fail once a day
    python -m benchmarks.studies.cluster_simulation --out docs/results  written as cluster.md, .json, .png and .pdf

What of it is measured and what is guessed stands in `study`, and in what is printed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from benchmarks.studies.cluster_simulation.report import draw, table
from benchmarks.studies.cluster_simulation.study import flags_parser, study
from procap.errors import UserError
from runner.results import write_bytes, write_json


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, simulate, print tables; with --out write them with a figure and the numbers."""
    flags = flags_parser().parse_args(arguments)
    try:
        report = study(flags)
        if flags.out:
            write_json(flags.out / "cluster.json", report)
            write_bytes(flags.out / "cluster.md", table(report).encode())
            draw(report, flags.out)
    except UserError as error:
        print(f"procap: {error}", file=sys.stderr)
        return error.exit_code
    print(table(report))
    if flags.json:
        print(json.dumps(report, allow_nan=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
