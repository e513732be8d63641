"""MLflow with many runs: time per call and pictures of its pages."""
