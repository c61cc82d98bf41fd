"""The block index in plain Python: tests compare the native index with it, and it runs where nothing was compiled."""
