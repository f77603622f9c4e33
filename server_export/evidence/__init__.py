"""What the product is held against: baselines, comparisons, attacks on gradients. Nothing else imports it."""
