"""The stages of tests/gpu/run.sh."""
