"""Our hooks fit the installed SGLang and say so when they do not; our lean CPU ops equal SGLang's native ones.

Everything that imports SGLang runs once, in `inside_sglang.py`, with the environment of a CPU server.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

import pytest

from draftloop.core.config import Config, ServerConfig
from draftloop.sglang.hooks import (
    DFLASH_WORKER,
    EAGLE_SERVER,
    EAGLE_WORKER,
    SCHEDULER,
    TESTED_VERSIONS,
    TOKENIZER_MANAGER,
)
from draftloop.sglang.server import server_environment

PROGRAM = Path(__file__).with_name("inside_sglang.py")


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    environment = server_environment(Config(server=ServerConfig(device="cpu", threads=1)), None)
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], env=environment, capture_output=True, text=True, check=False, timeout=400
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_installed_sglang_is_one_we_tested() -> None:
    assert version("sglang") in TESTED_VERSIONS


def test_sglang_finds_the_plugin_and_the_platform() -> None:
    for group, value in (
        ("sglang.srt.plugins", "draftloop.sglang.plugin:load"),
        ("sglang.srt.platforms", "draftloop.sglang.platform:activate"),
    ):
        (ours,) = [entry for entry in entry_points(group=group) if entry.value.startswith("draftloop.")]
        assert ours.value == value
        assert callable(ours.load())


def test_every_hook_fits(answers: dict[str, Any]) -> None:
    problems = answers["hooks"]["problems"]
    assert set(problems) >= {
        f"{EAGLE_WORKER}.__init__",
        "sglang.srt.layers.logits_processor.LogitsProcessor.forward",
        f"{EAGLE_WORKER}._draft_extend_for_prefill",
        f"{EAGLE_WORKER}._draft_extend_for_decode",
        f"{DFLASH_WORKER}.__init__",
        f"{DFLASH_WORKER}._accept_block",
        "sglang.srt.mem_cache.common.release_kv_cache",
        f"{SCHEDULER}.send_abort_output",
        f"{TOKENIZER_MANAGER}.generate_request",
        f"{EAGLE_SERVER}.forward_batch_generation",
        f"{DFLASH_WORKER}.forward_batch_generation",
        "sglang.srt.speculative.eagle_utils.organize_draft_results",
    }
    assert set(problems.values()) == {None}
    assert answers["hooks"]["check_good"] is None


def test_another_signature_is_named(answers: dict[str, Any]) -> None:
    hooks = answers["hooks"]
    assert hooks["renamed"] == "takes (self, server_args, gpu_id), expected (self, server_args, device)"
    assert "expected (req, tree_cache, is_insert, no_such_parameter)" in hooks["more"]
    message = hooks["check_bad"]
    assert version("sglang") in message
    assert f"{EAGLE_WORKER}.__init__ takes (self, server_args, gpu_id)" in message
    assert "install one of these" in message
    assert "\n" not in message


def test_a_missing_target_is_named(answers: dict[str, Any]) -> None:
    assert answers["hooks"]["gone"].startswith("does not exist (")
    assert "__init___gone" in answers["hooks"]["gone"]
    assert "no_such_module" in answers["hooks"]["no_module"]


def test_a_hook_that_was_not_applied_is_noticed(answers: dict[str, Any]) -> None:
    """None of the targets looks wrapped on its own, or `confirm_applied` would prove nothing."""
    for target, message in answers["hooks"]["unapplied"].items():
        assert message is not None, target
        assert f"hook {target} was not applied" in message
    assert answers["hooks"]["applied"] is None


def test_lean_ops_equal_the_native_ones(answers: dict[str, Any]) -> None:
    """Also where they hand over to the native form: other dtypes, partial and interleaved rotation."""
    ops = answers["ops"]
    assert len(ops) == 11
    assert {name: worst for name, worst in ops.items() if worst > 2e-5} == {}


def test_the_gpu_backend_has_its_place_in_sglang(answers: dict[str, Any]) -> None:
    gpu = answers["gpu"]
    assert gpu["registered"]
    assert gpu["created_by"]
    for name, (base, ours) in gpu["parameters"].items():
        assert ours[: len(base)] == base, name


def test_the_gpu_backend_reads_a_verification_right(answers: dict[str, Any]) -> None:
    """The trees' own blocks of SGLang's flat mask, the nodes' slots behind their prefixes, a padding request."""
    gpu = answers["gpu"]
    assert gpu["verifies"] == [True, False]
    assert gpu["mask"][0] == gpu["mask"][1]
    assert gpu["slots"][0] == gpu["slots"][1]
    assert gpu["lengths"] == [7, 3, 5, 4]
