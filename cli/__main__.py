"""`python -m vlarl_cli` is `vlarl`."""

from .main import main

main()
