"""Run `python -m benchmarks.studies.chaos`."""

import sys

from benchmarks.studies.chaos.campaign import main

if __name__ == "__main__":
    sys.exit(main())
