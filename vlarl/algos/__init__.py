"""Algorithms: credit assignment and loss, as pure functions."""
