"""Many runs on many machines."""
