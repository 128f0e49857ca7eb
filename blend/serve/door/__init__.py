"""The HTTP door of the server: OpenAI's protocol in, `blend.serve.request` on, answers, figures and errors back."""
