"""Studies: grids of models trained on equal tokens, declared in TOML; one table, one picture of loss against cost."""
