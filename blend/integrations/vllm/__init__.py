"""kvblend inside unpatched vLLM: a KV connector in its scheduler and workers, and a middleware of its server (docs/vllm.md).

Read: `contract` (what the three sides agree on: options, signed tickets) -> `middleware` and `prompts` (the server: a body
becomes a prompt with a ticket) -> `connector` -> `scheduler` (which prompts are loaded) -> `loads` (a worker blends them
between the engine's passes) -> `decoder` and `row_model` (vLLM's own model runs rows) -> `admission` (is it exact on this
model). `offline` computes caches.

In: requests to vLLM's server. Out: KV in vLLM's blocks, from which vLLM decodes.
"""
