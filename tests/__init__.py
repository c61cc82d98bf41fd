"""The tests mirror the package. A package themselves, so that one room's stand-ins can be imported by another's."""
