"""The KV caches of chunks: computed, kept under a prefix, corrected, put together for a prompt.

Computing: `library` (which caches a chunk should have) -> `encode` (computes them) -> `surrogate` (what contextual caches
stand behind); `probe` (may caches of another dtype or engine be used).
Reading: `opened` (the chunks of one prompt) -> `loader` (their layers, ahead of the pass) -> `assemble` (one layer into the
cache).
KV correction: `correction` (the formula) -> `fit` (rows of the user's own chunks) -> `regression` (one layer's map) ->
`gain` (what it adds while a layer is placed) -> `blend.prefill.correction_check` (does it fit this prompt).

In: token ids, a `RowDecoder`, a `ChunkStore`. Out: `ChunkCache`s in the store, a prompt's `BlendedCache` layer by layer.
To change the correction: `correction` and its plain twin `tests/corrections.py`, then `gain`. A stored correction of
another formula needs another `CORRECTION_FORMAT`, so that old ones are fitted again.
"""
