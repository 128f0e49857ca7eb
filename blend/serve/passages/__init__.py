"""Finds passages in messages: pasted chunks of a corpus, and long new texts to learn."""
