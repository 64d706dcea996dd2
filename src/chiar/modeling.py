"""The model classes under their public path, which exported model folders import."""

from chiar.model.modeling import ChiarForCausalLM, ChiarForSequenceClassification, ChiarModel

__all__ = ["ChiarForCausalLM", "ChiarForSequenceClassification", "ChiarModel"]
