"""Tree attention: one interface over a paged KV cache; torch backends (reference, CPU) and FlashInfer's (GPU)."""
