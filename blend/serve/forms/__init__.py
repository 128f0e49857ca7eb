"""Forms of answers: JSON of a schema, calls of functions, thoughts in front.

Read: `schemas` (a client's schema, checked in a process with limits) -> `grammar` (holds an answer to a form, token by
token) -> `tool_calls` and `thoughts` (how models write calls and thoughts, and the parsers of both).
In: `Tools` and schemas of a `Request`. Out: a `Grammar` for the engine, `ToolCall`s and thoughts for clients.
To add a way in which a model writes calls: a form of `tool_calls`, with a template of such a model in
`tests/serve/tool_templates.py`.
"""
