"""The other processes of a training group, when `trainer.processes` is more than one.

    Trainer (rank 0)   buffer, gate, candidates ── each step's batches ── Ray ──► Peer (rank 1, 2, ...)
         └──────── process group (gloo; NCCL on GPUs): gradients, shards of the drafter ────────┘

Rank 0 decides everything: a call on the drafter in training is made here and, by `Peers.also`, on every peer, so all
take the same steps. The peers belong to rank 0's actor and end with it. A process that dies breaks the group's next
collective, one that hangs breaks it after GROUP_TIMEOUT: then rank 0 raises, and whoever made it starts it, and so
the group, anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from ray.exceptions import RayError, RayTaskError
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import Store

from draftloop.core.config import Config
from draftloop.core.errors import ConfigError, TrainingError
from draftloop.drafters.batch import Batch
from draftloop.drafters.device import use_cuda
from draftloop.drafters.vocab import VocabMove
from draftloop.trainer.learner import Learner, training_device
from draftloop.trainer.saved import SavedTraining

# For the group to form, and for any one collective.
GROUP_TIMEOUT = timedelta(minutes=5)

# Ray passes arrays without copying, and tensors not.
Arrays = dict[str, NDArray[Any]]


class Peers:
    """Empty for one process. Raises TrainingError when the group does not form."""

    def __init__(self, target: Path, serving: Path, config: Config) -> None:
        self.mesh: DeviceMesh | None = None
        self._actors: list[Any] = []
        size = config.trainer.processes
        if size == 1:
            return
        if training_device(config) == "cuda" and (trainer_gpus(config) < 1 or not ray.get_gpu_ids()):
            raise ConfigError(
                f"{size} training processes on GPUs need one GPU each, reserved of Ray's: set fleet.trainer_gpus=1 and "
                "train in a fleet, or set trainer.processes=1"
            )
        host = ray.util.get_node_ip_address()
        store, port = _meeting_point(host, 0, first=True)
        actor = PeerActor.options(num_cpus=0, num_gpus=trainer_gpus(config))
        self._actors = [actor.remote(target, serving, config, rank, host, port) for rank in range(1, size)]
        try:
            self.mesh = _join(config, 0, store)
        except RuntimeError as err:
            raise TrainingError(f"{size} training processes did not come together: {_line(err)}") from None

    @contextlib.contextmanager
    def also(self, method: str, *args: Any, each: Sequence[Any] | None = None) -> Iterator[None]:
        """Let every peer make a call while the body makes it here. each: one more argument for each peer.

        Raises TrainingError when a process of the group is lost.
        """
        if not self._actors:
            yield
            return
        own: list[tuple[Any, ...]] = [()] * len(self._actors) if each is None else [(one,) for one in each]
        try:
            calls = [getattr(actor, method).remote(*args, *more) for actor, more in zip(self._actors, own, strict=True)]
            yield
            ray.get(calls, timeout=GROUP_TIMEOUT.total_seconds())
        except (RuntimeError, RayError) as err:
            raise TrainingError(
                f"the training group lost one of its {1 + len(self._actors)} processes ({_line(err)}): start it anew"
            ) from None

    def close(self) -> None:
        """End them."""
        for actor in self._actors:
            ray.kill(actor)
        if self._actors:
            dist.destroy_process_group()
        self._actors = []


class Peer:
    """One of them: it makes rank 0's calls on its own part of the drafter."""

    def __init__(self, target: Path, serving: Path, config: Config, rank: int, host: str, port: int) -> None:
        store, _ = _meeting_point(host, port, first=False)
        self._learner = Learner(target, serving, config, _join(config, rank, store))

    def step(self, batches: Sequence[Arrays]) -> None:
        self._learner.online.step(*(from_arrays(arrays, self._learner.device) for arrays in batches))

    def candidate(self) -> None:
        self._learner.online.candidate_state_dict()

    def state(self) -> None:
        self._learner.online.state_dict()

    def resume(self, folder: Path) -> None:
        saved = SavedTraining.load(folder)
        assert saved is not None, "rank 0 has read it"
        self._learner.online.load_state_dict(saved.tensors)

    def promoted(self, folder: Path) -> None:
        self._learner.promoted(folder)

    def change_vocabulary(self, move: Sequence[NDArray[Any]]) -> None:
        parts = (torch.tensor(part, device=self._learner.device) for part in move)
        self._learner.online.change_vocabulary(VocabMove(*parts))


PeerActor = ray.remote(Peer)


def trainer_gpus(config: Config) -> float:
    """What one training process reserves of Ray's GPUs."""
    if config.fleet.trainer_gpus is not None:
        return config.fleet.trainer_gpus
    return 1.0 if use_cuda(config.trainer.device) else 0.0


def to_arrays(batch: Batch) -> Arrays:
    """A batch on the CPU, as Ray takes it. The inverse of `from_arrays`."""
    return {field.name: getattr(batch, field.name).numpy() for field in fields(batch)}


def from_arrays(arrays: Arrays, device: str) -> Batch:
    # Ray's arrays are read-only; a tensor of its own is not.
    return Batch(**{name: torch.tensor(array, device=device) for name, array in arrays.items()})


def _meeting_point(host: str, port: int, *, first: bool) -> tuple[Store, int]:
    """Where the processes find each other, and its port. The first makes it, at a free port when `port` is 0."""
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=first, timeout=GROUP_TIMEOUT, wait_for_workers=False
    )
    return store, store.port


def _join(config: Config, rank: int, store: Store) -> DeviceMesh:
    device = training_device(config)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=config.trainer.processes,
        timeout=GROUP_TIMEOUT,
    )
    return init_device_mesh(device, (config.trainer.processes,))


def _line(error: BaseException) -> str:
    cause = error.cause if isinstance(error, RayTaskError) else error
    return " ".join(str(cause).split())[:200]
