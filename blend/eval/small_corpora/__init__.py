"""Small corpora to measure on: text of a seed -> corpora -> rows of results -> a table.

`scripts/sweep_small_corpora` is the door.
"""
