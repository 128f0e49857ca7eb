"""Blended prefill: one prompt becomes one cache, in five steps."""
