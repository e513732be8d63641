"""Read sweep files and show the results of sweeps; `cluster` executes them."""
