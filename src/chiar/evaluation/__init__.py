"""What a trained model is worth: perplexity, accuracy, routed fractions, counted FLOPs, and runs side by side."""
