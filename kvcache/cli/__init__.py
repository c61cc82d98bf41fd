"""The `kvcache` command; one file a subcommand."""
