"""NEW PACKAGE host."""
