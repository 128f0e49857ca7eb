"""How much a server holds at once, unless it is told otherwise; the command line shows these without loading a model."""

MOST_RUNNING = 16  # prompts
MOST_WAITING = 64
KV_BUDGET = 4 * 10**9  # bytes of the caches of running prompts
PREFIX_BUDGET = 10**9  # bytes of KV of earlier prompts and conversations
LEARN_BUDGET = 4 * 10**9  # bytes of each tenant's store for caches of texts that came with questions
MEMORY_BUDGET = 2 * 10**9  # bytes of chunk caches that are kept in memory
BODY_BUDGET = 25 * 10**7  # bytes of the bodies of all requests
