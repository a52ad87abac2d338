"""Is this installation, and this cluster, fit to train? Checks yield findings, which are shown."""
