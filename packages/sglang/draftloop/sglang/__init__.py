"""Everything the product needs from SGLang, as a plugin to the stock wheel: platform, tap, swap, client."""
