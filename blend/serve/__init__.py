"""The server: requests of many tenants over one engine, their documents, and what it learns in idle time.

Read: `request` (what a client asks for) -> `service` (`Service.submit` is the whole way) -> `blend.serve.prompts` (a
request becomes a `Prompt`) -> `prompt` -> `blend.serve.engine` (a prompt becomes a `Sequence` and answers) -> `events`
(what comes back) -> `blend.serve.outputs`. HTTP around it: `blend.serve.http`. Uploads: `blend.serve.documents`. Forms:
`blend.serve.forms`.
Found text: `token_index`. Why text was not reused: `reasons`. Quality while serving: `audit` -> `promises`, with `idle`.
Fairness: `turns`. What operators see: `metrics`, `failures`, `limits`.

In: a `Request`. Out: `Started`, `Output`s, then `Finished` or `Failed`.
"""
