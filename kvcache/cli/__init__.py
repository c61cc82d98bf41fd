"""The `kvcache` command: modules by subject, each with one or more subcommands."""
