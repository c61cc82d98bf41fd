"""The way to a cache from other processes. Knows no engines."""
