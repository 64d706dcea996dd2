"""A model's routing on a page: live, and as one file."""
