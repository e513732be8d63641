"""MLflow's pages: opened on the right runs, pictured, and measured with many runs."""
