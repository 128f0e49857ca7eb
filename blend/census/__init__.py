"""The census of a log: which tokens of its requests repeat, why exact prefixes miss them, and what reuse would save.

Read: `lines` (of a log) -> `reading` (their requests) -> `tokens` (counts) -> `memory` (what earlier requests held) ->
`matching` (sorts a prompt's tokens: prefix, shifted, near or new) -> `causes` (why prefixes miss) -> `census` (adds up, with
`rates`) -> `show`.

In: JSON lines of requests. Out: a `Census`. No model runs; nothing leaves the machine.
To add a form of request: a branch of `reading`, with a real log's line as its test.
"""
