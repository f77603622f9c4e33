"""The server's web page: chat with its models, and watch training runs."""
