"""The models by their public name: exported folders and `import chiar.modeling` find them here."""

from chiar.model.modeling import ChiarForCausalLM, ChiarForSequenceClassification, ChiarModel

__all__ = ["ChiarForCausalLM", "ChiarForSequenceClassification", "ChiarModel"]
