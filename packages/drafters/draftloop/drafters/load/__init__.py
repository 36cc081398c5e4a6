"""Speculation that follows the load: what a shape costs, what it brings, and which one to run now."""
