"""Research behind the documents, not needed to run a model: tests of the idea, studies and figures."""
