"""Optional parts, without which the rest works: public data sets, the dose of a scan, model cards."""
