"""Text from a trained model, token by token."""
