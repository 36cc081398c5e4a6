"""Prompts: built-in ones, files, what is wrong with a file, and the held-out share."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest

from draftloop.core.errors import PromptError
from draftloop.generator.prompts import Prompt, builtin_prompts, check_lengths, endless_passes, load_prompts, split


def make_prompts(**by_domain: int) -> list[Prompt]:
    return [
        Prompt(domain, ({"role": "user", "content": f"{domain} {i}"},), f"{domain}:{i}")
        for domain, count in by_domain.items()
        for i in range(count)
    ]


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
    return path


def test_builtin_prompts_are_code_and_chat() -> None:
    prompts = builtin_prompts()
    assert Counter(p.domain for p in prompts) == {"code": 164, "chat": 201}
    assert len({p.id for p in prompts}) == len(prompts)
    assert len({str(p.messages) for p in prompts}) == len(prompts)
    assert all(p.messages[-1]["role"] == "user" for p in prompts)
    assert "def has_close_elements" in prompts[0].messages[0]["content"]


def test_jsonl_with_both_columns(tmp_path: Path) -> None:
    path = write(
        tmp_path / "my file.jsonl",
        {"prompt": "Hi\u2028there"},
        "",
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Why?"},
                {"role": "assistant", "content": "Because."},
            ],
            "domain": "talk",
        },
    )
    first, second = load_prompts(path)
    assert first == Prompt("my-file", ({"role": "user", "content": "Hi\u2028there"},), "my-file:1")
    assert second.domain == "talk"
    assert [m["role"] for m in second.messages] == ["system", "user"]
    assert list(tmp_path.iterdir()) == [path]


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    rows = [{"messages": [{"role": "user", "content": "a"}]}, {"messages": [{"role": "user", "content": "b"}]}]
    datasets.Dataset.from_list(rows).to_parquet(path)
    assert [(p.domain, p.messages[0]["content"]) for p in load_prompts(path)] == [("rows", "a"), ("rows", "b")]
    datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": " "}]).to_parquet(path)
    with pytest.raises(PromptError, match=r"rows\.parquet row 2: empty prompt"):
        load_prompts(path)
    path.write_bytes(b"PAR1 but not really")
    with pytest.raises(PromptError, match=r"cannot read .*rows\.parquet"):
        load_prompts(path)


_GOOD = {"prompt": "fine"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "is empty"),
        (["", "  "], "is empty"),
        ([_GOOD, "{oops"], "line 2 is not JSON"),
        ([_GOOD, [1, 2]], "line 2 must be a JSON object, not a list"),
        ([{"text": "x"}], "line 1: neither `messages` nor `prompt`"),
        ([_GOOD, "", {"prompt": "  "}], "line 3: empty prompt"),
        ([{"prompt": 5}], "line 1: prompt must be a string, not a int"),
        ([{"messages": []}], "line 1: empty prompt"),
        ([{"messages": "hi"}], "line 1: messages must be a list, not a str"),
        ([{"messages": ["hi"]}], "line 1: each message must be an object"),
        ([{"messages": [{"role": "robot", "content": "x"}]}], "line 1: role must be one of .*'robot'"),
        ([{"messages": [{"role": "user", "content": [1]}]}], "line 1: content must be a string, not a list"),
        ([{"messages": [{"role": "assistant", "content": "x"}]}], "line 1: empty prompt"),
        ([{"prompt": "x", "domain": "a--b"}], "line 1: domain must be a short label"),
        ([{"prompt": "x", "domain": 3}], "line 1: domain must be a short label"),
    ],
)
def test_bad_rows_are_one_line_with_file_and_line(tmp_path: Path, rows: list[Any], message: str) -> None:
    path = write(tmp_path / "bad.jsonl", *rows)
    with pytest.raises(PromptError, match=message) as caught:
        load_prompts(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="no prompt file"):
        load_prompts(tmp_path / "absent.jsonl")
    with pytest.raises(PromptError, match=r"not \.csv"):
        load_prompts(write(tmp_path / "x.csv", "a"))
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(b'{"prompt": "caf\xe9"}\n')
    with pytest.raises(PromptError, match=r"latin\.jsonl") as caught:
        load_prompts(latin)
    assert "\n" not in str(caught.value)


def test_lengths() -> None:
    prompts = make_prompts(a=3)
    check_lengths(prompts, lambda messages: 10, 10)
    with pytest.raises(PromptError, match="prompt a:2 has 11 tokens and at most 10 fit"):
        check_lengths(prompts, lambda messages: 9 + int(messages[0]["content"][-1]), 10)


def test_split_is_disjoint_balanced_and_fixed_by_the_seed() -> None:
    prompts = make_prompts(chat=50, code=20, rare=3)
    # The same question twice must not be on both sides.
    prompts += [Prompt("chat", p.messages, f"again-{p.id}") for p in prompts[:50]]
    traffic, heldout = split(prompts, 20, seed=1)
    assert split(prompts, 20, seed=1) == (traffic, heldout)
    assert split(prompts, 20, seed=2)[1] != heldout
    assert Counter(p.domain for p in heldout) == {"chat": 9, "code": 9, "rare": 2}
    held = {str(p.messages) for p in heldout}
    assert len(held) == 20
    assert not held & {str(p.messages) for p in traffic}
    assert len(traffic) == 123 - 9 * 2 - 9 - 2
    assert {p.domain for p in traffic} == {"chat", "code", "rare"}


def test_split_needs_enough_prompts() -> None:
    with pytest.raises(PromptError, match=r"4 prompts cannot be held out of 5 different ones in 2 domain\(s\)"):
        split(make_prompts(a=3, b=2), 4, seed=0)


def test_endless_passes_shuffle_every_pass_by_the_seed() -> None:
    prompts = make_prompts(a=6)
    drawn = list(itertools.islice(endless_passes(prompts, 3), 18))
    passes = [drawn[:6], drawn[6:12], drawn[12:]]
    assert all(sorted(p.id for p in one) == [p.id for p in prompts] for one in passes)
    assert passes[0] != passes[1] != passes[2]
    assert drawn == list(itertools.islice(endless_passes(prompts, 3), 18))
    assert drawn != list(itertools.islice(endless_passes(prompts, 4), 18))
