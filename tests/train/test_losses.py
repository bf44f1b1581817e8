"""Chunked losses against the readable formula in float64, values and gradients."""

import pytest
import torch
import torch.nn.functional as F

from qdeepseek.train.losses import IGNORED, token_losses


def naive(hidden, labels, head, teacher_hidden, teacher_head):
    logits, target = head(hidden[:, :-1]).flatten(0, 1), labels[:, 1:].flatten()
    keep = target != IGNORED
    log_p = F.log_softmax(logits[keep], -1)
    log_q = F.log_softmax(teacher_head(teacher_hidden[:, :-1]).flatten(0, 1)[keep], -1)
    ce = -log_p[torch.arange(int(keep.sum())), target[keep]].mean()
    return ce, (log_q.exp() * (log_q - log_p)).sum(-1).mean()


@pytest.fixture
def parts():
    torch.manual_seed(0)
    hidden = torch.randn(3, 11, 8, requires_grad=True)
    head, teacher_head = torch.nn.Linear(8, 17, bias=False), torch.nn.Linear(8, 17, bias=False)
    labels = torch.randint(0, 17, (3, 11))
    labels[0, :5] = IGNORED
    return hidden, labels, head, torch.randn(3, 11, 8), teacher_head


@pytest.mark.parametrize("max_logits", [17, 17 * 7, 2**20])
def test_equals_the_formula_in_any_chunking(parts, max_logits):
    hidden, labels, head, teacher_hidden, teacher_head = parts
    expected = naive(hidden, labels, head, teacher_hidden, teacher_head)
    expected_grads = torch.autograd.grad(sum(expected), [hidden, head.weight], retain_graph=True)
    found = token_losses(hidden, labels, head, teacher_hidden, teacher_head, vocab_size=17, max_logits=max_logits)
    found_grads = torch.autograd.grad(sum(found), [hidden, head.weight])
    for a, b in zip((*found, *found_grads), (*expected, *expected_grads), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_logits_exist_one_chunk_at_a_time(parts):
    hidden, labels, head, teacher_hidden, teacher_head = parts
    rows = []
    head.register_forward_hook(lambda m, args, out: rows.append(out.shape[0]))
    teacher_head.register_forward_hook(lambda m, args, out: rows.append(out.shape[0]))
    ce, kl = token_losses(hidden, labels, head, teacher_hidden, teacher_head, vocab_size=17, max_logits=17 * 4)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        (ce + kl).backward()
    assert max(rows) == 4
    assert max(saved, default=0) <= 17 * 8  # nothing larger than the head's own weight


def test_batch_without_a_trained_token_is_zero_not_nan(parts):
    hidden, labels, head, *_ = parts
    ce, kl = token_losses(hidden, torch.full_like(labels, IGNORED), head, vocab_size=17)
    ce.backward()
    assert float(ce) == 0 and float(kl) == 0
    assert bool((hidden.grad == 0).all())
