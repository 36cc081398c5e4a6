"""Speculation that follows the load, inside SGLang's scheduler process."""
