"""Run `python -m benchmarks.studies.train_mini`."""

from benchmarks.studies.train_mini.train import main

if __name__ == "__main__":
    main()
