"""What a server is told about its steps' shapes, and how one that follows its load is pinned."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_llama import TinyTarget, random_prompts

from draftloop.core.config import Config, ServerConfig, SpeculationConfig, load_config
from draftloop.core.errors import ConfigError
from draftloop.drafters.checkpoint import read_hf_config
from draftloop.drafters.load.shapes import PLAIN, Shape
from draftloop.sglang.load.settings import LOAD_ENV, REPORT_FILE, LoadSettings, Pinned, pin, read_report, write_whole
from draftloop.sglang.server import Speculation, load_settings, server_environment
from draftloop.trainer.day0 import make_untrained

FOLLOWS = SpeculationConfig(follow_load=True)


@pytest.fixture(scope="module")
def drafters(target: TinyTarget, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An untrained checkpoint of each kind."""
    folder = tmp_path_factory.mktemp("drafters")
    config = Config()
    config.drafter.draft_vocab_size = 64
    made = {}
    for kind in ("eagle3", "dflash"):
        drafter = config.drafter.model_copy(update={"kind": kind, "block_size": 6})
        make_untrained(target.folder, drafter, random_prompts(4, [20], seed=0), folder / kind, kind, seed=0)
        made[kind] = folder / kind
    return made


def test_a_cpu_server_is_told_its_trees(drafters: dict[str, Path], tmp_path: Path) -> None:
    config = Config(server=ServerConfig(device="cpu", num_steps=2, topk=3, num_draft_tokens=5), speculation=FOLLOWS)
    settings = load_settings(config, Speculation(drafters["eagle3"], "v0"), tmp_path)
    assert (settings.algorithm, settings.follow) == ("EAGLE3", True)
    assert settings.shapes[0] == PLAIN
    assert Shape(2, 3, 5) in settings.shapes
    environment = server_environment(config, None, settings)
    assert LoadSettings.model_validate_json(environment[LOAD_ENV]) == settings
    assert environment["SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND"] == "1"
    assert LOAD_ENV not in server_environment(config, None)


def test_a_dflash_server_is_told_its_blocks(drafters: dict[str, Path], tmp_path: Path) -> None:
    config = Config(server=ServerConfig(device="cpu", topk=1), speculation=FOLLOWS)
    settings = load_settings(config, Speculation(drafters["dflash"], "v0", "dflash"), tmp_path)
    assert (settings.algorithm, settings.follow) == ("DFLASH", True)
    assert settings.shapes == (PLAIN, *(Shape(1, 1, n) for n in (2, 3, 4, 6)))
    assert read_hf_config(drafters["dflash"]).block_size == 6


@pytest.mark.parametrize(
    "config",
    [
        Config(server=ServerConfig(device="cpu")),
        Config(server=ServerConfig(device="cpu", topk=1, num_draft_tokens=4), speculation=FOLLOWS),
        Config(server=ServerConfig(device="cuda"), speculation=FOLLOWS),
    ],
    ids=["not asked for", "a chain has no confidences", "graphs run no Python"],
)
def test_others_keep_their_one_shape(config: Config, drafters: dict[str, Path], tmp_path: Path) -> None:
    settings = load_settings(config, Speculation(drafters["eagle3"], "v0"), tmp_path)
    assert not settings.follow
    server = config.server
    assert settings.shapes[-1] == Shape(server.num_steps, server.topk, server.num_draft_tokens)
    environment = server_environment(config, None, settings)
    assert LoadSettings.model_validate_json(environment[LOAD_ENV]) == settings
    assert "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND" not in environment


def test_a_negative_margin_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"speculation\.margin"):
        load_config(None, ["speculation.margin=-0.1"])


def test_pinned_shapes_take_turns_until_unpinned(tmp_path: Path) -> None:
    pinned = Pinned(tmp_path)
    assert pinned.next() is None
    shapes = (PLAIN, Shape(1, 2, 3), Shape(2, 2, 4))
    pin(tmp_path, shapes)
    seen = [pinned.next() for _ in range(6)]
    assert set(seen) == set(shapes)
    assert seen[:3] == seen[3:]
    pin(tmp_path, [PLAIN])
    assert pinned.next() == PLAIN
    pin(tmp_path, [])
    assert pinned.next() is None


def test_a_report_is_there_when_it_was_written(tmp_path: Path) -> None:
    assert read_report(tmp_path) is None
    write_whole(tmp_path / REPORT_FILE, '{"steps": {"1": {"plain": 3}}}')
    assert read_report(tmp_path) == {"steps": {"1": {"plain": 3}}}
