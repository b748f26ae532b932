"""Run configuration: typed sections, YAML composition, and readable errors. Torch-free."""
