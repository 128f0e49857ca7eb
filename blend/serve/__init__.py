"""Answers for many at once: the engine room of a server. What comes in and goes out over a network is not here."""
