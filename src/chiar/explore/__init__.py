"""A model's routing on a page: live (chiar explore), and as one file (chiar report)."""
