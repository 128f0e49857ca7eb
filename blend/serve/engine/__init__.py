"""From prompts to answers, in one thread: what each forward pass computes.

Read: `scheduler` (`EmbeddedEngine`: admits prompts, decides what the next pass computes) -> `sequence` (one prompt) ->
`prompt_prefill` (its prefill: from memory, blended, or computed in pieces) -> `decoding` (its tokens).
Rows of earlier prompts: `prefixes` (the same beginning) -> `edits` (which rows behind an edit are still right) ->
`histories` (the latest prompts of each end user) -> `comparison` (finds out in idle time what text depends on).
Worth it or not: `savings`, `profile`. Work that may wait: `background`.

In: `Prompt`s. Out: events, in `blend.serve.events`. Every wait for the device, the store or a client belongs to another
thread.
"""
