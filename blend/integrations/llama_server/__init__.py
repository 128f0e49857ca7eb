"""kvblend in front of an unpatched `llama-server`: a proxy that restores blended prompts into its slots (docs/llama_server.md).

Read: `upstream` (llama-server's HTTP interface) -> `prompt_ids` (the tokens of a request's prompt, as llama-server has them),
with `anthropic` (requests to `/v1/messages`) -> `slot_files` (blends a prompt, and writes it as a slot file) -> `sent` (prompts
whose rows llama-server may hold) -> `trial` (may slots of this server be filled) -> `proxy` (what is done for a request) ->
`app` (routes).

In: requests of any client of llama-server. Out: the same requests, behind a slot that holds most of their prompt, and
llama-server's own replies.
"""
