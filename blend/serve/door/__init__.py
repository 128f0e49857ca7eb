"""The HTTP door of the server: OpenAI's protocol in, `blend.serve.ask` on, answers, figures and errors back."""
