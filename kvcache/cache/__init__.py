"""NEW PACKAGE cache."""
