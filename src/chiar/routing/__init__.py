"""What was routed, where to cut, and what it costs."""
