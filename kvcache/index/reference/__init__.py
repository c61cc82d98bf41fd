"""NEW PACKAGE reference."""
