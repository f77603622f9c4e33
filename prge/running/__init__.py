"""What every run has whoever trains: its common settings, and who watches its loop."""
