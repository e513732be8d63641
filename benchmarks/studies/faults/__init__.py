"""Kill ranks of trainings at random moments and check the run afterwards."""
