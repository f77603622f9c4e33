"""Evidence about prge: baselines, comparisons and attacks on gradients. No other room imports it."""
