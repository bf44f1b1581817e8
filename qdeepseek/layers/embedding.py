"""rows of W_hat: an Embedding that looks up its quantised table."""

import torch.nn.functional as F
from torch import Tensor, nn

from qdeepseek.layers.linear import require_plain_weight
from qdeepseek.layers.weight_quantizer import WeightQuantizer


class QuantEmbedding(nn.Embedding):
    """An nn.Embedding with a `weight_quantizer`; shares its Parameter with the module it replaces.

    Raises ValueError for max_norm, which rewrites the weight in the forward.
    """

    weight_quantizer: WeightQuantizer

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, weight_quantizer: WeightQuantizer) -> "QuantEmbedding":
        require_plain_weight(embedding, "QuantEmbedding.from_embedding")
        if embedding.max_norm is not None:
            raise ValueError(
                f"QuantEmbedding.from_embedding: max_norm {embedding.max_norm} rewrites the table in the "
                "forward; build the embedding without max_norm or leave it unquantised"
            )
        module = cls(
            embedding.num_embeddings, embedding.embedding_dim, embedding.padding_idx,
            scale_grad_by_freq=embedding.scale_grad_by_freq, device="meta",
        )  # fmt: skip
        module.weight, module.weight_quantizer = embedding.weight, weight_quantizer
        return module.train(embedding.training)

    def to_embedding(self) -> nn.Embedding:
        """A plain Embedding with the same (unquantised) Parameter."""
        embedding = nn.Embedding(
            self.num_embeddings, self.embedding_dim, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq,
            device="meta",
        )  # fmt: skip
        embedding.weight = self.weight
        return embedding.train(self.training)

    def forward(self, input: Tensor) -> Tensor:
        return F.embedding(
            input,
            self.weight_quantizer(self.weight),
            self.padding_idx,
            scale_grad_by_freq=self.scale_grad_by_freq,
        )
