"""`python -m benchmarks.train_mini`."""

from benchmarks.train_mini.train import main

if __name__ == "__main__":
    main()
