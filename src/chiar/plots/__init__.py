"""Figures, drawn with matplotlib. Every `draw_…` function returns a Figure."""
