"""What every fit tells its loggers beside the losses; docs/wandb.md lists all names."""

from collections.abc import Sequence

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import WandbLogger

from qdeepseek.train.callbacks.expert_loads import ExpertLoads
from qdeepseek.train.callbacks.gradient_norm import GradientNorm
from qdeepseek.train.callbacks.layer_statistics import LayerStatistics
from qdeepseek.train.callbacks.routing import Routing
from qdeepseek.train.callbacks.throughput import Throughput
from qdeepseek.train.loggers import LoggerConfig


def tracking(config: LoggerConfig, wandb: WandbLogger | None, methods: Sequence[Callback]) -> list[Callback]:
    """Callbacks that watch a fit with these `methods`, behind which they stand."""
    loads: list[Callback] = []
    if wandb is not None:
        loads = [ExpertLoads(method, wandb) for method in methods if isinstance(method, Routing)]
    layers = [LayerStatistics(config.layers_every)] if config.layers_every else []
    return [*layers, *loads, Throughput(config.peak_tflops), GradientNorm()]
