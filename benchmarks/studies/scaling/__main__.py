"""Run `python -m benchmarks.studies.scaling`."""

import sys

from benchmarks.studies.scaling.benchmark import main

if __name__ == "__main__":
    sys.exit(main())
