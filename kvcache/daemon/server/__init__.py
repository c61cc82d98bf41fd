"""The daemon server: one process that owns a cache and serves it to clients of this host and of others."""
