"""NEW PACKAGE cuda."""
