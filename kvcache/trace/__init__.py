"""Traces of real traffic: recorder, formats, replay against a real cache, and the simulator that scores policies."""
