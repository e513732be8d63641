"""Export runs to MLflow."""
