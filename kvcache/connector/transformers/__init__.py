"""NEW PACKAGE transformers."""
