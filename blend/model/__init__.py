"""The decoder: a HuggingFace model, admitted by measurement and driven over chosen rows of prompts.

Read: `decoder` (what the product holds) -> `admission` (may this model be blended) -> `row_decoder` (the contract of
prefill) -> `passes` (what a pass is asked for) -> `driver` (runs it through transformers' doors) -> `cache` -> `generate`.
Recurrent layers: `recurrent` (the state) -> `mixers`. GPUs: `device_path` -> `fused`, `graphs`, `addressed_pass`.
CPUs: `cpu`, `precision`. Which weights made a cache: `fingerprint`.

In: a model with its tokenizer, then `RowRequest`s: token ids, sorted positions and a `BlendedCache` each.
Out: logits `[rows, vocabulary]`, KV in the cache, a `Generation`.
To add a model family: most need no code. A tiny configuration in `scripts/_families.py` runs every invariant on it.
"""
