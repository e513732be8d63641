"""Run `python -m benchmarks.studies.faults`."""

import sys

from benchmarks.studies.faults.campaign import main

if __name__ == "__main__":
    sys.exit(main())
