"""From a request to a prompt: passages, chat template, and all text whose KV can be reused.

Read: `build` (the steps, from refusal to the ready prompt) -> `view` (a corpus as one request sees it) -> `chat_template`
-> `reuse` (finds known text) -> `cutter` (cuts new text into pieces) -> `computed` (why the rest is computed).
Of a tenant: `tenant` (its corpora and texts) -> `learned` (text that requests brought, within a budget) -> `corrector`,
`trusted`.

In: a `Request`. Out: a `Prompt`.
To find more text: another kind of run in `PromptSearch`, with its `PlaceOrigin`.
"""
