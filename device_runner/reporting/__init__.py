"""Reports of training runs: reading run folders, blocks of a report, next steps, and trackers."""
