"""Data-parallel training on three machines, whose memories hold the data together, each picture once.

The pictures are three times what one machine may cache, and reading one takes 5 ms. In the first epoch each
is read from the source once, by whoever needs it first, and brought to the machine that owns it; from the
second on a rank finds a third of its pictures here, and asks the other machines for the rest.

    rank 0   machine 0 ──┐
    rank 1   machine 1 ──┤ session ── a third of the pictures in each machine's memory
    rank 2   machine 2 ──┘            source: not needed any more

Without an address, three Ray nodes are started on this machine, each with a runtime folder of its own, as if
it were another one. With one (or in RAY_ADDRESS), it trains on all nodes of that cluster, one rank each.

Run it: python examples/cluster_train.py [ADDRESS]        (Ray: `pip install 'hotset[ray]'`; half a minute)
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

import hotset

PICTURES = 1200
CLASSES = 6
READ_SECONDS = 0.005
# 1,200 pictures of 12 KiB are 14 MiB: too much for any one of three machines.
MEMORY = "6MiB"
MACHINES = 3


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    """Noise with a bright band, whose place is the label; stands for files on storage that is far away."""

    def __len__(self) -> int:
        return PICTURES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(READ_SECONDS)
        noise = torch.Generator().manual_seed(index)
        picture = torch.randint(0, 128, (3, 64, 64), dtype=torch.uint8, generator=noise)
        label = index % CLASSES
        picture[:, 10 * label : 10 * label + 10] += 64
        return picture, label


class Epoch(NamedTuple):
    """What one rank says of an epoch: its time, its loss, and where its pictures came from."""

    seconds: float
    loss: float
    local: int
    peer: int
    source: int


class Rank:
    """One process of the training: an actor of Ray's."""

    def __init__(self, rank: int, ranks: int, session: str) -> None:
        self.rank, self.ranks, self.session = rank, ranks, session
        torch.set_num_threads(1)
        torch.manual_seed(0)

    def host(self) -> tuple[str, int]:
        """Where the ranks meet: at the first of them. The port is the system's choice."""
        import ray

        address = ray.util.get_node_ip_address()
        self.store = dist.TCPStore(address, 0, self.ranks, is_master=True, wait_for_workers=False)
        return address, self.store.port

    def begin(self, meeting: tuple[str, int]) -> None:
        """Meet the other ranks, and join the cache."""
        if self.rank:
            self.store = dist.TCPStore(*meeting, self.ranks, is_master=False)
        dist.init_process_group("gloo", store=self.store, rank=self.rank, world_size=self.ranks)
        # The key says what is cached, as what a class of the main program is made of may differ by machine.
        self.pictures = hotset.cache(
            Pictures(), cluster="auto", session=self.session, memory=MEMORY, key="bands"
        )
        self.sampler: DistributedSampler[Any] = DistributedSampler(
            self.pictures, num_replicas=self.ranks, rank=self.rank, seed=7
        )
        self.loader = hotset.DataLoader(self.pictures, batch_size=25, sampler=self.sampler)
        self.net = DistributedDataParallel(
            nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(3 * 8 * 8, CLASSES))
        )
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.3)

    def train(self, epoch: int) -> Epoch:
        before, begun, losses = self.pictures.stats(), time.perf_counter(), 0.0
        self.sampler.set_epoch(epoch)
        for pictures, labels in self.loader:
            loss = nn.functional.cross_entropy(self.net(pictures / 64 - 1), labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses += loss.item()
        seconds, after = time.perf_counter() - begun, self.pictures.stats()
        source = after.misses - before.misses
        peer = after.peer_hits - before.peer_hits
        return Epoch(seconds, losses / len(self.loader), len(self.sampler) - peer - source, peer, source)

    def end(self) -> None:
        self.loader = None
        self.pictures.close()
        dist.destroy_process_group()


@contextlib.contextmanager
def machines(ray: Any, address: str | None) -> Iterator[list[str]]:
    """Be connected to a Ray cluster, the given one or one that ends with this; the nodes' ids."""
    from ray.cluster_utils import Cluster

    with contextlib.ExitStack() as stack:
        if address is None:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            place = stack.enter_context(
                tempfile.TemporaryDirectory(
                    prefix="cluster-train-", dir="/dev/shm", ignore_cleanup_errors=True
                )
            )
            cluster = Cluster()
            stack.callback(cluster.shutdown)
            for number in range(MACHINES):
                folder = os.path.join(place, str(number))  # made by hotset, for this user alone
                first = {} if number else {"include_dashboard": False}
                cluster.add_node(
                    num_cpus=1,
                    object_store_memory=80 << 20,
                    env_vars={"HOTSET_RUNTIME_DIR": folder},
                    **first,
                )
            address = cluster.address
        stack.callback(ray.shutdown)
        try:
            ray.init(address=address, logging_level="ERROR")
        except ConnectionError as error:
            sys.exit(f"No Ray cluster can be reached at {address}: {error}")
        yield [node["NodeID"] for node in ray.nodes() if node["Alive"]]


def train(ray: Any, nodes: list[str], session: str, epochs: int) -> None:
    """Train with one rank on each node, and print what each epoch was like."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ranks = [
        ray.remote(Rank)
        .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
        .remote(number, len(nodes), session)
        for number, node in enumerate(nodes)
    ]
    meeting = ray.get(ranks[0].host.remote())
    ray.get([rank.begin.remote(meeting) for rank in ranks])
    print(f"{PICTURES} pictures on {len(nodes)} machines; of each rank: local / peer / source")
    for epoch in range(epochs):
        said: list[Epoch] = ray.get([rank.train.remote(epoch) for rank in ranks])
        came = "   ".join(f"{one.local:>4} /{one.peer:>4} /{one.source:>4}" for one in said)
        loss = sum(one.loss for one in said) / len(said)
        print(
            f"epoch {epoch}: {max(one.seconds for one in said):.2f} s, loss {loss:.3f}   {came}", flush=True
        )
    ray.get([rank.end.remote() for rank in ranks])


def main() -> None:
    parser = argparse.ArgumentParser(description="train on several machines from one cache")
    parser.add_argument(
        "address",
        nargs="?",
        default=os.environ.get("RAY_ADDRESS"),
        help="of a Ray cluster, or auto; else one of three nodes is started here",
    )
    parser.add_argument("--epochs", type=int, default=4)
    words = parser.parse_args()
    try:
        import ray
        import zmq  # noqa: F401

        from hotset.cluster import ray_join as joining
    except ImportError as error:
        sys.exit(f"This example needs {error.name}, which is not installed; `pip install 'hotset[ray]'`.")
    session = f"cluster-train-{secrets.token_hex(4)}"
    with machines(ray, words.address) as nodes:
        try:
            train(ray, nodes, session, words.epochs)
        finally:
            with contextlib.suppress(hotset.ClusterError):  # it has not come so far
                joining.stop("auto", session)


if __name__ == "__main__":
    main()
