"""The HTTP side of the server: routes, bodies, replies in OpenAI's protocol."""
