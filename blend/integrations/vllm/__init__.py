"""kvblend inside unpatched vLLM: a KV connector, a middleware of its server, and a process that blends (docs/vllm.md)."""
