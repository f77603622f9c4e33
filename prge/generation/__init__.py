"""Text from a model: which token follows, when a text ends, and many texts at once. numpy alone."""
