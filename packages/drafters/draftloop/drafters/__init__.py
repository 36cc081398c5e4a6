"""Drafters in plain torch: models, training losses, trees, verification and checkpoints."""
