"""The client of a daemon: a `KVCache` whose blocks another process holds."""
