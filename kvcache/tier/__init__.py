"""Tiers, which store records. A tier knows no other tier and no engine."""
