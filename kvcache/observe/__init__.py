"""Observability: counters, metrics, reasons, events and recent requests. Independent of tiers and engines."""
