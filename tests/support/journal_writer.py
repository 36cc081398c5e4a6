"""A process that fills a journal until it is killed, and says before and after each step what it does.

    journal_writer.py FOLDER SEED SEQUENCE      SEQUENCE: of the first delivery

Lines: "try STEP" before and "ack STEP" after it is durable; STEP is "deliver SEQUENCE", "train SEQUENCE" or
"delete SEQUENCE". A delivery has three records, "SEQUENCE-0" to "SEQUENCE-2", and one that was dropped.
"""

from __future__ import annotations

import os
import random
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from records import make_record

from draftloop.capture.buffer import ReplayBuffer
from draftloop.capture.journal import Journal, Kept
from draftloop.core.records import CaptureRecord

SOURCE = "worker"
SEGMENT_BYTES = 4000


def delivery(sequence: int) -> list[CaptureRecord]:
    return [
        replace(make_record(sequence, "ab"[i % 2], tokens=5 + sequence % 7), request_id=f"{sequence}-{i}")
        for i in range(3)
    ]


def came_at(time: float, kept: Kept) -> bool:
    return kept.time == time


def say(word: str, step: str) -> None:
    os.write(1, f"{word} {step}\n".encode())


def main() -> None:
    folder, rng, sequence = Path(sys.argv[1]), random.Random(int(sys.argv[2])), int(sys.argv[3])
    buffer = ReplayBuffer(1 << 20, 1.0, 0.2, 0.5, seed=0, journal=Journal(folder, SEGMENT_BYTES))
    while True:
        step = rng.choices(["deliver", "train", "delete"], [4, 2, 1])[0]
        of = sequence if step == "deliver" else rng.randint(1, max(sequence - 1, 1))
        say("try", f"{step} {of}")
        if step == "deliver":
            buffer.add(delivery(of), now=float(of), dropped=1, source=SOURCE, sequence=of)
            sequence += 1
        elif step == "train":
            buffer.mark_trained([kept for kept in buffer.entries if kept.time == of])
        else:
            buffer.delete(partial(came_at, float(of)))
        say("ack", f"{step} {of}")


if __name__ == "__main__":
    main()
