"""What a run tells a person: its folder read as it is, what a report says of it, and what to type next."""
