"""The KV caches of chunks: computed, kept under a prefix, corrected, put together for a prompt."""
