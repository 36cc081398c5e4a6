"""The books: every record has one fate, whatever happens to it in whatever order."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.capture.ledger import Arrived, Counts, Ledger, Left, Trained, entry_fields, entry_of

STEPS = st.one_of(
    st.tuples(st.just("arrive"), st.lists(st.booleans(), max_size=4), st.integers(0, 2)),
    st.tuples(st.just("train"), st.sets(st.integers(1, 30), max_size=5), st.just(0)),
    st.tuples(st.sampled_from(["expired", "dropped", "deleted"]), st.sets(st.integers(1, 30), max_size=4), st.just(0)),
)


@given(steps=st.lists(STEPS, max_size=30))
@settings(max_examples=100, deadline=None)
def test_each_record_has_one_fate(steps: list[tuple[str, list[bool] | set[int], int]]) -> None:
    """The oracle keeps a word for every record that ever came."""
    ledger = Ledger()
    words: list[str] = []
    kept: dict[int, int] = {}
    for kind, what, dropped in steps:
        if isinstance(what, list):
            entry: Arrived | Trained | Left = Arrived(ledger.next_id, tuple(what), dropped, "", 0)
            for i, held_out in enumerate(what):
                kept[ledger.next_id + i] = len(words)
                words.append("held_out" if held_out else "pending")
            words += ["dropped"] * dropped
        else:
            ids = tuple(sorted(what & kept.keys()))
            if kind == "train":
                entry = Trained(ids)
                for i in ids:
                    words[kept[i]] = "trained" if words[kept[i]] == "pending" else words[kept[i]]
            else:
                entry = Left(ids, kind)  # type: ignore[arg-type]
                for i in ids:
                    if words[kept[i]] != "trained" or kind == "deleted":
                        words[kept[i]] = kind
                    del kept[i]
        ledger.apply(entry_of(*entry_fields(entry)))
        assert ledger.counts == Counts(captured=len(words), kept=len(kept), **Counter(words))
        assert ledger.counts.balanced
        again = Ledger.from_fields(ledger.to_fields())
        assert (again.counts, again.states, again.next_id) == (ledger.counts, ledger.states, ledger.next_id)


def test_what_cannot_be_is_refused() -> None:
    ledger = Ledger()
    ledger.apply(Arrived(1, (False, True), 0, "w", 4))
    with pytest.raises(KeyError):
        ledger.apply(Trained((3,)))
    with pytest.raises(ValueError, match="from id 2 on where 3 comes next"):
        ledger.apply(Arrived(2, (False,), 0, "w", 5))
    assert [ledger.has("w", sequence) for sequence in (0, 3, 4, 5)] == [False, True, True, False]
    assert not ledger.has("x", 1)


def test_unbalanced_counts_are_seen() -> None:
    assert Counts(captured=3, trained=1, pending=2).balanced
    assert not Counts(captured=3, trained=1, pending=1).balanced
