"""Text from a trained model, as it is produced."""
