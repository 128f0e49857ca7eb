"""Known text in the prompts of a model's own `generate`.

While a model is attached, a hook looks at each call of its `forward` that begins a prompt. Known text is put into the caller's
own cache by blended prefill, and the model computes the last rows itself. Without known text the call goes through untouched.
Read `attached` (what users call) -> `calls` (which calls are prompts, and how their caches are filled) -> `known` (known
text in prompts of token ids) -> `seen` (text that came once).

In: a model, its tokenizer, a store. Out: nothing but faster prompts, and an `Attachment` that says what was done.
"""
