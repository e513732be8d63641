"""Ranks of trainings killed at random moments, and what must hold of the run afterwards."""
