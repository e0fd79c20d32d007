"""Optional parts, without which the rest works: public data sets, weights for others with their model card."""
