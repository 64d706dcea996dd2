"""The model: decoder, language model and classifier, cache, decoding, and how their weights are saved and opened."""
