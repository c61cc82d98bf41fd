"""Copies between GPU pages and host memory."""
