"""What is said: counters, metrics from one table, reasons. Knows nothing of tiers and engines."""
