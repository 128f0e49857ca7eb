"""From a request to a prompt: passages, chat template, and all text whose KV can be reused."""
