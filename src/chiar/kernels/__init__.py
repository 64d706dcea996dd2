"""The mathematics of CHIAR-Former on plain tensors; nothing here knows of models, files or commands."""
