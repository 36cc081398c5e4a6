"""Tree attention: one interface over a paged KV cache, with a torch backend (FlashInfer's comes with the GPU path)."""
