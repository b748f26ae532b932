"""The command line of vlarl; installs as `vlarl_cli`."""
