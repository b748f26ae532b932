"""Policies: act, evaluate, save."""
