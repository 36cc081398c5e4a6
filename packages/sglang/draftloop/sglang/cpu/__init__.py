"""The CPU platform's parts: torch twins of SGLang's kernels, an attention backend, packed linear layers."""
