"""Studies: a declared grid of models trained on equal tokens, one table, one picture of loss against cost."""
