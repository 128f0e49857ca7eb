"""From the engine's tokens to what clients see.

Read: `detokenizer` (text out of tokens, up to a stop text) -> `processor` (text, thoughts, calls of functions, sources,
estimates).
In: the engine's events. Out: the client's, of the same types.
"""
