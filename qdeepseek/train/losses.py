"""Next-token losses from hidden states, chunked so that logits (T, V) of a large vocabulary never exist whole.

Cross-entropy   CE = −mean_t log p_student(y_t)
Distillation    KL = mean_t Σ_v p_teacher (log p_teacher − log p_student) at the same positions
loss = (1 − w)·CE + w·KL.   T tokens, H hidden, V vocabulary.

A chunk computes its logits, its loss sums, and throws the logits away; the backward recomputes them
(non-reentrant checkpoint), so at most one chunk of student and one of teacher logits exist at any time.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from qdeepseek.layers import QuantLinear

IGNORED = -100
Head = Callable[[Tensor], Tensor]


def output_head(model: PreTrainedModel) -> Head:
    """Hidden states -> logits; a quantised head fake-quantises its weight once here, not once a chunk."""
    head = model.get_output_embeddings()
    if not isinstance(head, QuantLinear):
        return head
    weight, quantize_input = head.weight_quantizer(head.weight), head.input_quantizer
    return lambda h: F.linear(h if quantize_input is None else quantize_input(h), weight, head.bias)


def shift(hidden_BLH: Tensor, labels_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states (T, H) and their next tokens (T,), flattened; the last position of a row is dropped."""
    return hidden_BLH[:, :-1].flatten(0, 1), labels_BL[:, 1:].flatten()


def chunk_sums(
    hidden_TH: Tensor, labels_T: Tensor, head: Head, teacher_TH: Tensor | None, teacher_head: Head | None
) -> tuple[Tensor, Tensor]:
    """Sum of −log p(label) and of KL to the teacher over the tokens whose label is not IGNORED."""
    log_p_TV = F.log_softmax(head(hidden_TH).float(), -1)
    ce = F.nll_loss(log_p_TV, labels_T, ignore_index=IGNORED, reduction="sum")
    if teacher_TH is None or teacher_head is None:
        return ce, ce.new_zeros(())
    with torch.no_grad():
        log_q_TV = F.log_softmax(teacher_head(teacher_TH).float(), -1)
    kl_T = F.kl_div(log_p_TV, log_q_TV, reduction="none", log_target=True).sum(-1)
    return ce, (kl_T * (labels_T != IGNORED)).sum()


def token_losses(
    hidden_BLH: Tensor,
    labels_BL: Tensor,
    head: Head,
    teacher_BLH: Tensor | None = None,
    teacher_head: Head | None = None,
    *,
    vocab_size: int,
    max_logits: int = 2**25,
) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy and mean KL over the trained tokens of a batch (KL is 0 without a teacher).

    `max_logits` bounds the elements of one chunk of logits. The mean over zero trained tokens is 0.
    """
    hidden_TH, labels_T = shift(hidden_BLH, labels_BL)
    teacher_TH = None if teacher_BLH is None else shift(teacher_BLH, labels_BL)[0]
    rows = max(1, max_logits // vocab_size)
    count = (labels_T != IGNORED).sum().clamp_min(1)
    if len(labels_T) <= rows:
        ce, kl = chunk_sums(hidden_TH, labels_T, head, teacher_TH, teacher_head)
        return ce / count, kl / count
    ce = kl = hidden_TH.new_zeros((), dtype=torch.float32)
    for start in range(0, len(labels_T), rows):
        part = slice(start, start + rows)
        teacher_part = None if teacher_TH is None else teacher_TH[part]
        ce_part, kl_part = checkpoint(
            chunk_sums, hidden_TH[part], labels_T[part], head, teacher_part, teacher_head, use_reentrant=False
        )
        ce, kl = ce + ce_part, kl + kl_part
    return ce / count, kl / count
