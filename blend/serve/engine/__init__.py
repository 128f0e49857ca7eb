"""From prompts to answers, in one thread: what each pass computes."""
