"""Chunked log-probabilities: values, gradients, memory, and agreement with the plain definition."""

import pytest
import torch

from rollstream.learner.logprobs import distribution_logprobs, token_logprobs, truncate_logits


def problem(num=7, width=5, vocabulary=11, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    hidden, weight, bias = (torch.randn(*shape, generator=generator, dtype=dtype) for shape in ((num, width), (vocabulary, width), (vocabulary,)))
    return hidden, weight, bias, torch.randint(vocabulary, (num,), generator=generator)


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("with_bias", [False, True])
def test_gradients_of_logprobs_and_entropy_are_right_for_any_chunk(chunk, with_bias):
    hidden, weight, bias, targets = problem()
    inputs = [hidden.requires_grad_(), weight.requires_grad_()] + ([bias.requires_grad_()] if with_bias else [])

    def both(hidden, weight, bias=None):
        return tuple(token_logprobs(hidden, weight, targets, 0.7, chunk, True, bias))

    assert torch.autograd.gradcheck(both, inputs)
    assert torch.autograd.gradcheck(lambda *a: both(*a)[0], inputs)
    assert torch.autograd.gradcheck(lambda *a: both(*a)[1], inputs)


def test_it_is_log_softmax():
    hidden, weight, bias, targets = problem()
    expected = torch.log_softmax((hidden @ weight.t() + bias) / 0.6, dim=-1)
    found = token_logprobs(hidden, weight, targets, 0.6, 3, True, bias)
    torch.testing.assert_close(found.logprobs, expected.gather(1, targets[:, None]).squeeze(1), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(found.entropy, -(expected.exp() * expected).sum(-1), rtol=1e-13, atol=1e-13)
    assert token_logprobs(hidden, weight, targets).entropy is None


def test_sixteen_bit_inputs_are_scored_in_float32():
    hidden, weight, _, targets = problem(dtype=torch.bfloat16)
    hidden.requires_grad_()
    found = token_logprobs(hidden, weight, targets).logprobs
    assert found.dtype == torch.float32
    expected = torch.log_softmax(hidden.float() @ weight.float().t(), dim=-1).gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    assert hidden.grad.dtype == torch.bfloat16


def test_a_near_certain_token_keeps_its_digits_in_float32():
    hidden = torch.tensor([[1.0]])
    weight = torch.tensor([[30.0], [22.0]])
    found = token_logprobs(hidden, weight, torch.tensor([0]), want_entropy=True)
    assert found.logprobs.item() == pytest.approx(-3.35406e-4, rel=1e-4)
    assert found.entropy.item() == pytest.approx(3.0183e-3, rel=1e-3)


def test_a_token_that_cannot_occur_leaves_entropy_and_gradient_finite():
    hidden, weight, bias, targets = problem()
    bias[0] = float("-inf")
    hidden.requires_grad_()
    found = token_logprobs(hidden, weight, targets.clamp(min=1), 1.0, 4, True, bias)
    (found.logprobs.sum() + found.entropy.sum()).backward()
    assert torch.isfinite(found.entropy).all()
    assert torch.isfinite(hidden.grad).all()


def test_only_what_needs_a_gradient_gets_one():
    hidden, weight, _, targets = problem()
    weight.requires_grad_()
    token_logprobs(hidden, weight, targets).logprobs.sum().backward()
    assert hidden.grad is None
    assert weight.grad is not None
    with torch.no_grad():
        assert not token_logprobs(hidden, weight, targets).logprobs.requires_grad


def test_nothing_of_size_tokens_times_vocabulary_is_kept_for_backward():
    hidden, weight, _, targets = problem(num=64, vocabulary=1000)
    hidden.requires_grad_()
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: sizes.append(saved.numel()) or saved, lambda saved: saved):
        token_logprobs(hidden, weight, targets, chunk_tokens=8, want_entropy=True)
    assert max(sizes) == weight.numel()


def test_no_tokens_give_no_logprobs():
    _, weight, _, _ = problem()
    found = token_logprobs(torch.zeros(0, 5, dtype=torch.float64, requires_grad=True), weight, torch.zeros(0, dtype=torch.int64), want_entropy=True)
    found.logprobs.sum().backward()
    assert found.logprobs.shape == found.entropy.shape == (0,)


@pytest.mark.parametrize("wrong", [{"temperature": 0.0}, {"chunk_tokens": 0}])
def test_settings_that_make_no_distribution_are_refused(wrong):
    hidden, weight, _, targets = problem()
    with pytest.raises(ValueError, match="positive"):
        token_logprobs(hidden, weight, targets, **wrong)
    with pytest.raises(ValueError, match="expected"):
        token_logprobs(hidden, weight[:, :2], targets)


def test_top_p_keeps_tokens_until_the_mass_before_them_reaches_it():
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64))
    assert torch.isfinite(truncate_logits(logits, None, 0.5)).tolist() == [[True, False, False, False]]
    assert torch.isfinite(truncate_logits(logits, None, 0.51)).tolist() == [[True, True, False, False]]
    assert torch.isfinite(truncate_logits(logits, 2, 1.0)).tolist() == [[True, True, False, False]]
    assert torch.isfinite(truncate_logits(logits, 0, None)).all()


def test_a_token_outside_the_kept_set_cannot_have_been_sampled():
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    logprobs, entropy = distribution_logprobs(logits, torch.tensor([0, 2]), top_k=2)
    assert logprobs.tolist() == [0.0, float("-inf")]
    assert entropy[1].item() == pytest.approx(0.832, abs=1e-3)
