"""An HTTP server for a bundle, with OpenAI's protocol, learning from feedback, and a web page."""
