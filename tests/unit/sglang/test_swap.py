"""What a swap knows before it sends a byte: how the server holds a checkpoint's tensors, and their checksums.

The swap itself is tested on a real server (`tests/serving`).
"""

from __future__ import annotations

import hashlib
import logging
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from draftloop.core.errors import ServerError
from draftloop.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftloop.sglang.client import ServerClient
from draftloop.sglang.held_tensors import server_tensors
from draftloop.sglang.swap import server_checksums
from draftloop.sglang.swap_loader import load, path_entry

SHAPE = Eagle3Config(
    hidden_size=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    intermediate_size=10,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    vocab_size=100,
    draft_vocab_size=70,
    layer_ids=(0, 1, 2),
    max_position_embeddings=64,
)


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    drafter = Eagle3Drafter.untrained(SHAPE, torch.arange(70), torch.randn(100, 8), torch.rand(8) + 0.5, seed=1)
    return {name: tensor.detach() for name, tensor in drafter.state_dict().items()}


def test_tensors_as_the_server_holds_them(state: dict[str, torch.Tensor]) -> None:
    held = server_tensors(state, "eagle3")
    layer = "model.layers.0"
    assert {name: tuple(tensor.shape) for name, tensor in held.items()} == {
        "model.fc.weight": (8, 24),
        f"{layer}.self_attn.qkv_proj.weight": ((4 + 2 + 2) * 6, 16),
        f"{layer}.self_attn.o_proj.weight": (8, 24),
        f"{layer}.mlp.gate_up_proj.weight": (20, 8),
        f"{layer}.mlp.down_proj.weight": (8, 10),
        f"{layer}.input_layernorm.weight": (8,),
        f"{layer}.hidden_norm.weight": (8,),
        f"{layer}.post_attention_layernorm.weight": (8,),
        "model.norm.weight": (8,),
        "lm_head.weight": (128, 8),
        "hot_token_id": (70,),
    }
    qkv, gate_up, head = (
        held[f"{layer}.self_attn.qkv_proj.weight"],
        held[f"{layer}.mlp.gate_up_proj.weight"],
        held["lm_head.weight"],
    )
    assert torch.equal(qkv[:24], state["midlayer.self_attn.q_proj.weight"])
    assert torch.equal(qkv[24:36], state["midlayer.self_attn.k_proj.weight"])
    assert torch.equal(qkv[36:], state["midlayer.self_attn.v_proj.weight"])
    assert torch.equal(gate_up[:10], state["midlayer.mlp.gate_proj.weight"])
    assert torch.equal(gate_up[10:], state["midlayer.mlp.up_proj.weight"])
    assert torch.equal(head[:70], state["lm_head.weight"])
    assert not head[70:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checksums_are_of_the_bytes_in_the_servers_dtype(state: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    sums = server_checksums(state, "eagle3", dtype, cuda=False)
    assert sums.keys() == server_tensors(state, "eagle3").keys()
    for name, tensor in server_tensors(state, "eagle3").items():
        stored = tensor if name == "hot_token_id" else tensor.to(dtype)
        raw = bytes(stored.contiguous().view(torch.uint8).flatten().tolist())
        assert sums[name] == hashlib.sha256(raw).hexdigest()[:16]


def test_one_changed_weight_changes_one_checksum(state: dict[str, torch.Tensor]) -> None:
    before = server_checksums(state, "eagle3", torch.float32, cuda=False)
    state["midlayer.self_attn.k_proj.weight"][3, 5] += 1e-6
    after = server_checksums(state, "eagle3", torch.float32, cuda=False)
    assert [name for name in before if before[name] != after[name]] == ["model.layers.0.self_attn.qkv_proj.weight"]


def test_the_loader_refuses_without_raising(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An exception there would end SGLang's scheduler. No model is needed: none of these gets as far as one."""
    bad = tmp_path / "nan.safetensors"
    save_file({"fc.weight": torch.tensor([1.0, float("nan")])}, bad)
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(bad.read_bytes()[:-3])
    cases = {
        "holds a NaN": path_entry(bad),
        "nan.safetensor": path_entry(tmp_path / "nan.safetensor"),
        "incomplete": path_entry(cut),
        "expected a name that begins with": ("fc.weight", torch.zeros(2)),
    }
    for reason, tensors in cases.items():
        caplog.clear()
        with caplog.at_level(logging.ERROR):
            load(None, [tensors])
        assert "the old one stays" in caplog.text
        assert reason in caplog.text


def test_a_server_that_is_gone_is_one_clear_line() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with ServerClient(url, timeout_s=5) as client:
        assert not client.healthy()
        with pytest.raises(ServerError) as caught:
            client.post("/pause_generation", {"mode": "in_place"})
    assert url in str(caught.value)
    assert "/pause_generation" in str(caught.value)
    assert "\n" not in str(caught.value)
