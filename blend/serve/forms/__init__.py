"""Forms of answers: JSON of a schema, calls of functions, thoughts in front."""
