"""The mesh axis pipe in an engine: how a model is cut into stages, and how a step runs them."""
