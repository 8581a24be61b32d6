"""What is run beside the trainer, from the repository root: `python -m tools.bench --help`."""
