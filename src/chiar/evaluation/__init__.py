"""Evaluation of models: perplexity, accuracy, routed fractions and counted FLOPs, also of several side by side."""
