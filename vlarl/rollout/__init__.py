"""Plans and the collector."""
