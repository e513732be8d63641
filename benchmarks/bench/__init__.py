"""What `procap bench` does with suites: choose, plan, and make their tables and figures when the runs are done."""
