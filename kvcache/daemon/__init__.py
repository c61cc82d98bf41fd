"""The daemon and its clients: a cache in one process, used by others. Imports no engine."""
