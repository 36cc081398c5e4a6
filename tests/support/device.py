"""Where the tests serve and train: DRAFTLOOP_TEST_DEVICE, `cpu` by default or `cuda`.

The tests compare with transformers in fp32. On a GPU that takes an attention backend for fp32 (SGLang's triton), and
dot products that are not shortened to TF32.
"""

from __future__ import annotations

import os

DEVICE = os.environ.get("DRAFTLOOP_TEST_DEVICE", "cpu")
EXACT = {"device": DEVICE, "attention": "triton"}
if DEVICE == "cuda":
    os.environ["TRITON_F32_DEFAULT"] = "ieee"  # the servers inherit it
