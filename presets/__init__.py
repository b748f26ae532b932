"""Presets: YAML files that compose into runs; installs as `vlarl_presets`."""
