"""What a GPU and its node can do, as stated by the vendor, and the shares of it that a training step reaches.

Every number is a key of conf/hardware and can be overridden: `qdeepseek plan hardware=h100_80gb hardware.mfu=0.35`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """One GPU, its links and its node. Bytes, bytes a second, operations a second.

    memory          of one GPU; reserve: what CUDA, NCCL and the allocator's fragments take of it
    flops           dense bf16; fp32_flops for what stays in fp32 (TF32 off)
    bandwidth       of the GPU's memory
    link, network   each GPU's to the others of its node, and to other nodes, one direction
    host_link       GPU to host memory, one direction; host_bandwidth: the memory of one node's host
    host_memory     of one node
    mfu             share of flops that matrix multiplications reach; efficiency: share of the bandwidths
    """

    name: str
    memory: float
    flops: float
    fp32_flops: float
    bandwidth: float
    link: float
    network: float
    host_link: float
    host_bandwidth: float
    host_memory: float
    reserve: float = 4e9
    mfu: float = 0.4
    efficiency: float = 0.8

    def __post_init__(self) -> None:
        for key in ("memory", "flops", "fp32_flops", "bandwidth", "link", "network", "host_link", "host_bandwidth"):
            if getattr(self, key) <= 0:
                raise ValueError(f"{key} {getattr(self, key)} must be positive")
        for key in ("mfu", "efficiency"):
            if not 0 < getattr(self, key) <= 1:
                raise ValueError(f"{key} {getattr(self, key)} must lie in (0, 1]")
        if not 0 <= self.reserve < self.memory:
            raise ValueError(f"reserve {self.reserve} must be below memory {self.memory}")
