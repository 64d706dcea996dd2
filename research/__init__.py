"""What the documents rest on and nobody needs to run a model: tests of the idea, and their figures."""
