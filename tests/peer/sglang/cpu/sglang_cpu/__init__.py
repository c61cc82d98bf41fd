"""What SGLang needs of a GPU and gets from torch here. A plugin of its own kind, for tests."""
