"""The census of a log: which tokens of its requests repeat, why exact prefixes miss them, and what reuse would save."""
