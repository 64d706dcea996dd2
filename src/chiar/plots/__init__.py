"""Pictures with matplotlib. Every `draw_…` returns a Figure."""
