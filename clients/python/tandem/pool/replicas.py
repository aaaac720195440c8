"""A rollout server of a pool, and what the pool counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem._proto.rollout.v1 import rollout_pb2
from tandem.rpc.client import RolloutClient


@dataclass(eq=False)
class Replica:
    """A rollout server of a pool, and what the pool knows about it.

    Attributes:
        client: its client, which the pool closes.
        capacity: number of samples that it draws at the same time.
        max_queue: most samples of a batch.
        has_junior: whether it holds a junior.
        lost: whether it failed, and has not answered since.
        calls: number of the pool's calls that it is working on.
        updates: number of updates that keep prompts away from it.
    """

    client: RolloutClient
    capacity: int
    max_queue: int
    has_junior: bool
    lost: bool = False
    calls: int = 0
    updates: int = 0

    @classmethod
    def of(cls, client: RolloutClient, info: rollout_pb2.GetServerInfoResponse) -> Replica:
        """Returns the replica that `info`, the server's own answer, describes."""
        return cls(client, info.max_num_seqs, info.max_queue, info.HasField("junior"))

    @property
    def window(self) -> int:
        """Most samples that it is sent at a time: those that it draws, and as many that wait."""
        return min(2 * self.capacity, self.max_queue)


@dataclass
class PoolCounts:
    """Work of a pool's replicas. The numbers depend on the clock, the answers do not.

    Attributes:
        replicas: addresses of the replicas that answered.
        moved: prompts and sequences that a replica took over from a slower one.
        retried: prompts and sequences that were retried because their replica failed or its
            call reached the deadline.
    """

    replicas: set[str] = field(default_factory=set)
    moved: int = 0
    retried: int = 0

    def metrics(self) -> dict[str, int]:
        """Returns the counts by their keys in metrics.jsonl."""
        return {
            "rollout/replicas": len(self.replicas),
            "rollout/prompts_moved": self.moved,
            "rollout/prompts_retried": self.retried,
        }
