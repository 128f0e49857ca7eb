"""Passages in messages: known chunks found where they were pasted, new long ones cut so that they are found again."""
