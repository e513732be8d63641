"""Run the command line as `python -m benchmarks.cli`, without an installed `procap` script."""

from __future__ import annotations

import sys

from benchmarks.cli import main

sys.exit(main())
