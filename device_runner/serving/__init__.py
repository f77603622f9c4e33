"""A bundle as a server that speaks OpenAI's protocol."""
