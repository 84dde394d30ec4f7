"""What is put around each repeated block of a model, and what it costs."""
