"""Connectors for engines: each translates between the engine's interface and the cache's API, without logic of its
own."""
