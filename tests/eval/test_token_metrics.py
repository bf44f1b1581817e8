"""Metrics of one pass against a naive float64 reference on whole logits."""

import copy

import pytest
import torch

from eval.heldout import document_batches
from eval.token_metrics import score, token_metrics


@pytest.fixture
def models(tiny_model):
    torch.manual_seed(1)
    student = copy.deepcopy(tiny_model)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.004)
    return student, tiny_model


def ragged_batches():
    generator = torch.Generator().manual_seed(2)
    batches = []
    for rows in (2, 1):
        ids = torch.randint(0, 288, (rows, 24), generator=generator)
        labels = ids.clone()
        labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
        batches.append({"input_ids": ids, "labels": labels})
    return batches


def reference(student, teacher, batches):
    """(nll, correct, kl, agree, tokens) of every row, float64 on whole logits."""
    rows = []
    for batch in batches:
        with torch.no_grad():
            z, q = (m(input_ids=batch["input_ids"]).logits.double()[:, :-1] for m in (student, teacher))
        for row, labels in enumerate(batch["labels"][:, 1:]):
            keep = labels != -100
            p, t = z[row][keep].softmax(-1), q[row][keep].softmax(-1)
            y = labels[keep]
            rows.append((
                -p[torch.arange(len(y)), y].log().sum(), (p.argmax(-1) == y).sum(),
                (t * (t / p).log()).sum(), (p.argmax(-1) == t.argmax(-1)).sum(), keep.sum(),
            ))  # fmt: skip
    return [torch.stack([torch.as_tensor(r[i], dtype=torch.float64) for r in rows]) for i in range(5)]


def test_equals_the_float64_reference(models):
    student, teacher = models
    batches = ragged_batches()
    m = token_metrics({"s": student}, batches, teacher=teacher)["s"]
    nll, correct, kl, agree, tokens = reference(student, teacher, batches)
    assert m.unit == "sequence" and torch.equal(m.ids_U, torch.arange(3))
    assert torch.equal(m.correct_U, correct) and torch.equal(m.agree_U, agree)
    assert torch.equal(m.tokens_U, tokens)
    # fp32 logits carry an error of about 1e-6 of their size; sums over some 17 tokens
    torch.testing.assert_close(m.nll_U, nll, rtol=2e-6, atol=0)
    torch.testing.assert_close(m.kl_U, kl, rtol=1e-4, atol=0)
    assert m.kl > 1e-4 and 0 < m.agreement < 1
    assert m.loss == pytest.approx(float(nll.sum() / tokens.sum()), rel=2e-6)


def test_score_against_float64_of_the_same_logits():
    z, q = torch.randn(2, 50, 300, generator=torch.Generator().manual_seed(0)) * 4
    y = torch.arange(50)
    got = score(z, y, q)
    p, t = z.double().log_softmax(-1), q.double().log_softmax(-1)
    torch.testing.assert_close(got[:, 0], -p[y, y], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got[:, 2], (t.exp() * (t - p)).sum(-1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("max_logits", [1, 288, 288 * 7])
def test_chunks_do_not_change_the_result(models, max_logits):
    student, teacher = models
    whole = token_metrics({"s": student}, ragged_batches(), teacher=teacher)["s"]
    chunked = token_metrics({"s": student}, ragged_batches(), teacher=teacher, max_logits=max_logits)["s"]
    assert torch.equal(whole.correct_U, chunked.correct_U) and torch.equal(whole.agree_U, chunked.agree_U)
    # a matmul of other row count may round otherwise: two fp32 roundings of logits of size 1
    torch.testing.assert_close(whole.nll_U, chunked.nll_U, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(whole.kl_U, chunked.kl_U, rtol=1e-5, atol=1e-6)


def test_no_logits_beyond_the_bound_exist(models, monkeypatch):
    student, teacher = models
    sizes = []
    head = student.get_output_embeddings()
    handle = head.register_forward_hook(lambda _module, _args, out: sizes.append(out.numel()))
    token_metrics({"s": student}, ragged_batches(), teacher=teacher, max_logits=288 * 4)
    handle.remove()
    assert max(sizes) <= 288 * 4 and len(sizes) > 3


def test_batch_size_does_not_change_the_result(models):
    student, teacher = models
    ids = torch.randint(0, 288, (4, 16), generator=torch.Generator().manual_seed(0))
    one = [{"input_ids": ids, "labels": ids}]
    four = [{"input_ids": row[None], "labels": row[None]} for row in ids]
    a = token_metrics({"s": student}, one, teacher=teacher)["s"]
    b = token_metrics({"s": student}, four, teacher=teacher)["s"]
    assert torch.equal(a.ids_U, b.ids_U) and torch.equal(a.tokens_U, b.tokens_U)
    torch.testing.assert_close(a.nll_U, b.nll_U, rtol=1e-6, atol=1e-6)


def test_the_teacher_has_no_distance_to_itself(models):
    student, teacher = models
    both = token_metrics({"fp_ft": teacher, "qat": student}, ragged_batches(), teacher=teacher)
    assert both["fp_ft"].kl == 0 and both["fp_ft"].agreement == 1
    alone = token_metrics({"qat": student}, ragged_batches(), teacher=teacher)["qat"]
    assert torch.equal(alone.kl_U, both["qat"].kl_U)


def test_no_teacher_no_distance(models):
    m = token_metrics({"s": models[0]}, ragged_batches())["s"]
    assert m.kl is None and m.agreement is None and m.loss > 0


def test_documents_are_the_unit_where_batches_carry_them(models):
    tokens = torch.tensor([256, *range(10), 257, 256, *range(30), 257, 256, *range(8)])
    batches = document_batches(tokens, length=13, batch_size=2, boundary=256)
    m = token_metrics({"s": models[0]}, batches)["s"]
    # 4 windows of 13 lose their first token: document 1 has 12 tokens less one, and so on
    assert m.unit == "document" and m.ids_U.tolist() == [1, 2, 3]
    starts = torch.arange(0, 52, 13)
    documents = (tokens[:52] == 256).cumsum(0)
    documents = documents[~torch.isin(torch.arange(52), starts)]
    assert m.tokens_U.tolist() == documents.bincount()[1:].tolist()


def test_training_flags_are_put_back(models):
    student = models[0].train()
    student.model.layers[1].eval()
    token_metrics({"s": student}, ragged_batches())
    assert student.training and student.model.layers[0].training and not student.model.layers[1].training


def test_packed_positions_and_mask_reach_the_model(models):
    ids = torch.randint(0, 256, (1, 16), generator=torch.Generator().manual_seed(3))
    allowed = torch.ones(16, 16, dtype=torch.bool).tril()
    allowed[8:, :8] = False
    packed = {
        "input_ids": ids, "labels": torch.cat([ids[:, :8], torch.tensor([[-100]]), ids[:, 9:]], 1),
        "position_ids": torch.cat([torch.arange(8), torch.arange(8)])[None],
        "attention_mask": allowed[None, None],
    }  # fmt: skip
    two = [{"input_ids": part, "labels": part} for part in ids.split(8, 1)]
    a = token_metrics({"s": models[0]}, [packed])["s"]
    b = token_metrics({"s": models[0]}, two)["s"]
    assert a.tokens == b.tokens == 14 and a.loss == pytest.approx(b.loss, rel=1e-5)


def test_errors_name_cause_and_remedy(models):
    ids = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"no token to score in 1 sequences.*held-out split"):
        token_metrics({"s": models[0]}, [{"input_ids": ids, "labels": ids - 100}])
    with pytest.raises(ValueError, match="no token to score in 0 sequences"):
        token_metrics({"s": models[0]}, [])
    with torch.no_grad():
        models[0].lm_head.weight[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match=r"'qat'.*1 of 1 sequences"):
        token_metrics({"qat": models[0]}, [{"input_ids": ids, "labels": ids}])


def test_remembered_teacher_states_change_nothing(models, monkeypatch):
    student, teacher = models
    batches, remember = ragged_batches(), []
    plain = token_metrics({"student": student, "teacher": teacher}, batches, teacher=teacher)
    first = token_metrics({"teacher": teacher}, batches, teacher=teacher, remember=remember)["teacher"]
    assert [len(h) for h in remember] == [int((b["labels"][:, 1:] != -100).sum()) for b in batches]
    monkeypatch.setattr(type(teacher.base_model), "forward", only(student.base_model))
    second = token_metrics({"student": student}, batches, teacher=teacher, remember=remember)["student"]
    for found, expected in ((first, plain["teacher"]), (second, plain["student"])):
        assert torch.equal(found.kl_U, expected.kl_U) and torch.equal(found.nll_U, expected.nll_U)


def only(allowed):
    """A forward that works for one module of the class and fails for every other."""
    forward = type(allowed).forward

    def guarded(self, *args, **kwargs):
        assert self is allowed, "the teacher ran again"
        return forward(self, *args, **kwargs)

    return guarded
