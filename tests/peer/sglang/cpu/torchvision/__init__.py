"""Stands in for torchvision, whose published build needs CUDA's torch: names alone, for models of text."""

__version__ = "0.28.0"
