"""A model behind OpenAI's completions protocol."""
