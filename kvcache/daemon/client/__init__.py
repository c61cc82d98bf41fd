"""NEW PACKAGE client."""
