"""Env backends."""
