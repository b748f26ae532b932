"""Network code."""
