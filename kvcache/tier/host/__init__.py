"""The host tier: records in slots of one arena of host memory."""
