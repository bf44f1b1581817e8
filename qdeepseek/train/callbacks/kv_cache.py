"""Fake-quant of the KV cache during QAT (`method/kv_cache=int8`), glue above surgery/kv_cache.py.

Put in place with the other quantisers, and like them off until `method.delay_steps` and left in the student, so that
the export says what its cache was trained as. There is no state to resume; the scheme is in the checkpoint, and another
one is refused. Every `log_every` optimizer steps the signal-to-quantisation-noise ratio of the cached tensors is
logged: mean over them and the lowest.
"""

from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from qdeepseek.layers.kv_cache import CacheQuantizer
from qdeepseek.quant.kv_cache import KVCacheScheme
from qdeepseek.surgery.kv_cache import attach_kv_cache, cache_quantizers, check_kv_cache


class KVCacheQuant(Callback):
    """Quantises what would be cached.

    Args:
        cache: CacheFormat of keys and values, or of MLA's latent, as a mapping.
        rope: CacheFormat of MLA's rope key; None leaves it in 16 bits. Unused by models without MLA.
        log_every: optimizer steps between two logged ratios.
    """

    def __init__(self, cache: Mapping[str, Any], rope: Mapping[str, Any] | None = None, log_every: int = 50):
        self.scheme = KVCacheScheme.from_dict({"cache": cache, "rope": rope})
        if log_every < 1:
            raise ValueError(f"log_every {log_every} must be at least 1")
        self.log_every = log_every
        self._quantizers: list[CacheQuantizer] = []

    def check(self, run: Any, model: nn.Module) -> None:
        """Refuses a model that the scheme does not fit, before anything is trained."""
        check_kv_cache(model, self.scheme)

    def attach(self, run: Any, student: nn.Module) -> None:
        attach_kv_cache(student, self.scheme)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._quantizers = [quantizer for _, quantizer in cache_quantizers(pl_module)]

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        for quantizer in self._quantizers:
            quantizer.observe = trainer.global_step % self.log_every == 0

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        errors = [quantizer.error for quantizer in self._quantizers if quantizer.error is not None]
        for quantizer in self._quantizers:
            quantizer.observe, quantizer.error = False, None
        if errors:
            noise_N, signal_N = torch.stack(errors).unbind(-1)
            sqnr_N = 10 * torch.log10(signal_N / noise_N)
            pl_module.log("kv_cache/sqnr_db", sqnr_N.mean())
            pl_module.log("kv_cache/sqnr_db_min", sqnr_N.min())

    def state_dict(self) -> dict[str, Any]:
        return {"scheme": self.scheme.to_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        stored = KVCacheScheme.from_dict(state_dict["scheme"])
        if stored != self.scheme:
            raise ValueError(
                f"method.kv_cache: the checkpoint was trained with {stored.label}, this run asks for "
                f"{self.scheme.label}; continue with the same, or start in another run_dir"
            )
