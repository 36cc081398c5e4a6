"""Empty on purpose: see `EXTERNAL_MODELS` in `draftloop.sglang.server`."""
