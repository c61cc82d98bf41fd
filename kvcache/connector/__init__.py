"""Engines that load this library: thin translations between their words and the face, without logic of their own."""
