"""The client of a daemon: a cache of the same contract whose blocks another process holds."""
