"""NEW PACKAGE index."""
