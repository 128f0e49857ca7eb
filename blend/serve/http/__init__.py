"""The HTTP side of the server: routes, bodies, replies in the protocols of OpenAI and Anthropic.

Read: `app` (routes) -> `completions` (the plainest protocol) -> `replies` (`answer`: body in, whole answer or stream out)
-> `submission` (prepared in turn with other clients) -> `bodies`, `chat` (fields and their checks) -> `to_requests` (a body
becomes `Request`s). Who may ask: `state`, `keys`. What is logged: `request_log`, `tracing`. What is refused: `errors`.
Around it: `server`, `connections`, `body_budget`.
Other protocols: `messages` (Anthropic's), `responses`, `embeddings`, `documents` (our own).

In: HTTP requests. Out: JSON, or server-sent events.
To add a protocol: one file with a body that derives from `CommonBody` (`ConversationBody` for conversations), a `Reply`,
and a function that calls `answer`; a route in `app`; a column in docs/http.md.
"""
