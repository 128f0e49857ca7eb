"""Selectors compared: every method on the same records, resumably -> result lines -> tables and a picture.

`scripts/bench_selection` is the door.
"""
