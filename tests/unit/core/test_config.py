"""draftloop.core.config: round trip, overrides, one-line errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftloop.core.config import Config, load_config, save_config
from draftloop.core.errors import ConfigError


def test_the_resolved_config_reads_back_unchanged(tmp_path: Path) -> None:
    config = load_config(None, ["seed=7", "drafter.layer_ids=[2, 15, 27]", "traffic.prompts=data/p.jsonl"])
    save_config(config, tmp_path / "draftloop.yaml")
    assert load_config(tmp_path / "draftloop.yaml") == config
    assert config.drafter.layer_ids == (2, 15, 27)
    assert config.traffic.prompts == Path("data/p.jsonl")


def test_no_file_and_no_override_gives_the_defaults() -> None:
    assert load_config(None) == Config()


def test_an_override_wins_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "draftloop.yaml"
    path.write_text("server:\n  topk: 2\n  num_steps: 5\n", encoding="utf-8")
    config = load_config(path, ["server.topk=8"])
    assert (config.server.topk, config.server.num_steps) == (8, 5)


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("", encoding="utf-8")
    assert load_config(tmp_path / "empty.yaml") == Config()


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("server.topk", "section.key=value"),
        ("=3", "section.key=value"),
        ("server.topk=0", "server.topk"),
        ("server.tpok=4", "server.tpok"),
        ("seed.deep=4", "seed"),
        ("server.topk=[1", "not valid YAML"),
        ("target.dtype=int8", "target.dtype"),
    ],
)
def test_a_bad_override_is_one_clear_line(override: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, ["seed=1", override])
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a\n- b\n", "mapping"),
        ("server: {topk: [1\n", "not valid YAML"),
        ("sevrer: {}\n", "sevrer"),
        ("demo: {minutes: -1}\n", "demo.minutes"),
    ],
)
def test_a_bad_file_is_one_clear_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "draftloop.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load_config(tmp_path / "nowhere.yaml")
