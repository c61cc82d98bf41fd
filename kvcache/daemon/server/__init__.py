"""NEW PACKAGE server."""
