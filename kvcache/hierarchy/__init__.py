"""The tiers together: index, flow, and the face that callers see. Knows no sockets and no engines."""
