"""vlarl: reinforcement learning of vision-language-action policies."""

__version__ = "0.1.0"
