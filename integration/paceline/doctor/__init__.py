"""Is this installation, and this cluster, fit to train? Facts are gathered, judged as values, and shown."""
