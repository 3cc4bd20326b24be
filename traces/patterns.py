"""The ways to write a language model's loss, each as a small program: those that are fused, and those that are not.

The name of an argument says which tensor it is; see `programs.arguments`.
"""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical
from torch.utils.checkpoint import checkpoint

from thunder_flce.inspection.programs import Sizes
from thunder_flce.matching.decisions import Reason

SIZES = Sizes(batch=2, sequence=24, hidden=16, vocab=100)
"""Of the table, and of the tests."""
CROSS_ENTROPY = nn.CrossEntropyLoss()
NLL_LOSS = nn.NLLLoss()
LOG_SOFTMAX = nn.LogSoftmax(dim=-1)


def _loss(logits, labels, **settings):
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **settings)


# Shapes and casts.


def float32_logits(hidden, weight, labels):
    return _loss(F.linear(hidden, weight).float(), labels)


def flattened(hidden, weight, labels):
    return F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), labels.flatten())


def flat_hidden_states(hidden, weight, labels):
    logits = F.linear(hidden.view(-1, hidden.shape[-1]), weight)
    return F.cross_entropy(logits, labels.view(-1))


def transposed(hidden, weight, labels):
    """(B, V, T), as cross_entropy takes more than two dimensions."""
    return F.cross_entropy(F.linear(hidden, weight).transpose(1, 2), labels)


def permuted_and_contiguous(hidden, weight, labels):
    return F.cross_entropy(F.linear(hidden, weight).permute(0, 2, 1).contiguous(), labels, reduction="none").mean()


def matrix_transposed(hidden, weight, labels):
    return CROSS_ENTROPY(F.linear(hidden, weight).mT, labels)


def sequence_first(hidden, weight, labels):
    """(T, B, V) logits, as Megatron has them, brought to (B, T, V)."""
    logits = F.linear(hidden.transpose(0, 1), weight).transpose(0, 1).contiguous()
    return _loss(logits, labels)


def one_sequence(hidden, weight, labels):
    return F.cross_entropy(F.linear(hidden, weight)[0], labels[0])


def one_token(hidden, weight, labels):
    """No dimension but the vocabulary."""
    return F.cross_entropy(F.linear(hidden[0, 0], weight), labels[1, 1])


# Shifts and slices.


def padded_label_shift(hidden, weight, labels):
    """The shift of transformers since 4.48."""
    logits = F.linear(hidden, weight).float()
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), ignore_index=-100, reduction="mean")


def shift_by_slices(hidden, weight, labels):
    """The shift of transformers before that."""
    logits = F.linear(hidden, weight).float()
    logits = logits[..., :-1, :].contiguous()
    labels = labels[..., 1:].contiguous()
    return CROSS_ENTROPY(logits.view(-1, logits.shape[-1]), labels.view(-1))


def shift_by_slices_and_transpose(hidden, weight, labels):
    return F.cross_entropy(F.linear(hidden, weight)[:, :-1].transpose(1, 2), labels[:, 1:])


def shift_by_narrow(hidden, weight, labels):
    steps = labels.shape[1] - 1
    logits = F.linear(hidden, weight).transpose(1, 2).narrow(2, 0, steps)
    return F.cross_entropy(logits, labels.narrow(1, 1, steps))


def sliced_rows_of_flat_logits(hidden, weight, labels):
    logits = F.linear(hidden, weight).view(-1, weight.shape[0])
    return F.cross_entropy(logits[1::2], labels.view(-1)[1::2])


def last_position(hidden, weight, labels):
    return F.cross_entropy(F.linear(hidden, weight)[:, -1], labels[:, -1])


def rows_picked_by_a_tensor(hidden, weight, labels):
    """As a classifier reads the last token of each sequence."""
    rows = torch.arange(hidden.shape[0], device=hidden.device)
    return F.cross_entropy(F.linear(hidden, weight)[rows, rows + 1], labels[:, 3])


def sliced_hidden_states(hidden, weight, labels):
    """As transformers does with `logits_to_keep`."""
    logits = F.linear(hidden[:, slice(-8, None), :], weight)
    return _loss(logits, labels[:, -8:])


def first_columns_of_the_vocabulary(hidden, weight, labels):
    """A vocabulary padded for speed, without its padding."""
    return _loss(F.linear(hidden, weight)[..., :91], labels.clamp(max=90))


# Factors and softcaps.


def divided(hidden, weight, labels):
    """As granite has it."""
    return _loss(F.linear(hidden, weight) / 8.0, labels)


def multiplied(hidden, weight, labels):
    """As cohere has it."""
    return _loss(0.0625 * F.linear(hidden, weight).float(), labels)


def negated_and_shifted(hidden, weight, labels):
    return _loss((F.linear(hidden, weight) * -0.3)[:, :-1], labels[:, 1:])


def scaled_by_a_tensor(hidden, weight, labels, temperature):
    return _loss(F.linear(hidden, weight) / temperature, labels)


def temperature_of_each_sequence(hidden, weight, labels, advantages):
    """As verl has it."""
    return _loss(F.linear(hidden, weight) / (advantages + 0.5).clamp(min=1e-8).unsqueeze(-1).unsqueeze(-1), labels)


def softcapped(hidden, weight, labels):
    """As gemma2 has it."""
    logits = F.linear(hidden, weight)
    logits = logits / 3.0
    logits = torch.tanh(logits)
    logits = logits * 3.0
    return _loss(logits.float(), labels)


def softcapped_in_one_line(hidden, weight, labels):
    """As litgpt has it, and a factor before and after."""
    return _loss(2 * (torch.tanh(F.linear(hidden, weight) * 1.5 / 4.9) * 4.9), labels)


def softcapped_by_a_sigmoid(hidden, weight, labels):
    """As modded-nanogpt has it."""
    return _loss(30 * torch.sigmoid(F.linear(hidden, weight).float() / 7.5), labels)


def softcapped_by_a_shifted_sigmoid(hidden, weight, labels):
    """As modded-nanogpt has it since 2025."""
    return _loss(23 * torch.sigmoid((F.linear(hidden, weight) + 5) / 7.5), labels)


def softcapped_and_shifted(hidden, weight, bias, labels):
    logits = 3 * (F.linear(hidden, weight, bias).float() / 3).tanh()
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="sum")


# The linear.


def matmul_operator(hidden, weight, labels):
    return _loss(hidden @ weight.t(), labels)


def torch_matmul(hidden, weight, labels):
    return _loss(torch.matmul(hidden, weight.T), labels)


def matmul_with_a_matrix(hidden, matrix, labels):
    """The matrix is (H, V)."""
    return _loss(hidden @ matrix, labels)


def matmul_with_a_square_matrix(hidden, square, labels):
    """Permuted to what it was: not the transpose of the weight that `permute` is most often given for."""
    return _loss(hidden @ square.permute(0, 1), labels.clamp(max=hidden.shape[-1] - 1))


def torch_mm(hidden, weight, labels):
    return F.cross_entropy(torch.mm(hidden.view(-1, hidden.shape[-1]), weight.transpose(0, 1)), labels.view(-1))


def einsum(hidden, weight, labels):
    return _loss(torch.einsum("bth,vh->btv", hidden, weight), labels)


def convolution_of_one_token(hidden, weight, bias, labels):
    """As `nn.Conv1d(hidden, vocab, 1)` has it, with the classes before the tokens."""
    return F.cross_entropy(F.conv1d(hidden.transpose(1, 2), weight[..., None], bias), labels)


def linear_with_bias(hidden, weight, bias, labels):
    return _loss(F.linear(hidden, weight, bias), labels)


def bias_added(hidden, weight, bias, labels):
    return _loss(F.linear(hidden, weight) + bias, labels)


def bias_of_one_row(hidden, weight, bias, labels):
    """As BART's final_logits_bias."""
    return _loss(F.linear(hidden, weight) + bias[None], labels)


def bias_added_to_matmul(hidden, weight, bias, labels):
    return _loss(bias + torch.matmul(hidden, weight.mT), labels)


def addmm(hidden, weight, bias, labels):
    return F.cross_entropy(torch.addmm(bias, hidden.view(-1, hidden.shape[-1]), weight.t()), labels.view(-1))


def low_rank_adapter(hidden, weight, adapter_down, adapter_up, labels):
    """LoRA around lm_head; the weight is frozen."""
    logits = F.linear(hidden, weight.detach())
    return _loss(logits + F.linear(F.linear(hidden, adapter_down), adapter_up) * 2.0, labels)


def low_rank_adapter_by_matmul(hidden, weight, bias, adapter_down, adapter_up, labels):
    """The same as litgpt writes it."""
    adapter = (hidden @ adapter_down.transpose(0, 1) @ adapter_up.transpose(0, 1)) * 0.3
    return _loss(F.linear(hidden, weight, bias) + adapter, labels)


def low_rank_adapter_on_logits_without_grad(hidden, weight, adapter_down, adapter_up, labels):
    """Gradients flow through one of the two linears only."""
    with torch.no_grad():
        logits = F.linear(hidden, weight)
    return _loss(logits + F.linear(F.linear(hidden, adapter_down), adapter_up), labels)


def tied_embeddings(tokens, weight, labels):
    return _loss(F.linear(torch.tanh(F.embedding(tokens, weight)), weight), labels)


# The loss.


def label_smoothing(hidden, weight, labels):
    return _loss(F.linear(hidden, weight), labels, label_smoothing=0.1)


def label_smoothing_by_hand(hidden, weight, labels):
    """As LabelSmoother of transformers, but for changes in place: a sum of the log-probabilities of all classes."""
    losses = -F.log_softmax(F.linear(hidden, weight), dim=-1)
    is_valid = labels != -100
    of_labels = losses.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    smoothed = 0.9 * of_labels + 0.1 * losses.sum(-1, dtype=torch.float32) / weight.shape[0]
    return (smoothed * is_valid).sum() / is_valid.sum()


def class_weights(hidden, weight, class_weight, labels):
    return _loss(F.linear(hidden, weight), labels, weight=class_weight, reduction="sum")


def class_weights_and_label_smoothing(hidden, weight, class_weight, labels):
    return _loss(F.linear(hidden, weight), labels, weight=class_weight, label_smoothing=0.2)


def class_weights_of_nll_loss(hidden, weight, class_weight, labels):
    log_probs = F.log_softmax(F.linear(hidden, weight), dim=-1).view(-1, weight.shape[0])
    return F.nll_loss(log_probs, labels.view(-1), weight=class_weight, ignore_index=-100)


def log_softmax_and_nll_loss(hidden, weight, labels):
    log_probs = F.log_softmax(F.linear(hidden, weight).float(), dim=-1)
    return F.nll_loss(log_probs.view(-1, weight.shape[0]), labels.view(-1))


def log_softmax_and_transposed_nll_loss(hidden, weight, labels):
    return NLL_LOSS(F.linear(hidden, weight).log_softmax(-1).transpose(1, 2), labels)


def modules_of_log_softmax_and_nll_loss(hidden, weight, labels):
    return NLL_LOSS(LOG_SOFTMAX(F.linear(hidden, weight).float()).flatten(0, 1), labels.flatten())


def num_items_in_batch(hidden, weight, labels, num_items):
    """As transformers does it with gradient accumulation."""
    return _loss(F.linear(hidden, weight).float(), labels, reduction="sum") / num_items


def divided_by_the_number_of_valid_targets(hidden, weight, labels):
    loss = _loss(F.linear(hidden, weight), labels, reduction="none")
    return loss.sum() / (labels != -100).sum()


def added_to_other_losses(hidden, weight, labels):
    return _loss(F.linear(hidden, weight), labels) / 4 + 0.01 * hidden.square().mean()


def losses_on_one_head(hidden, weight, labels):
    """A prediction from each of two hidden states."""
    first = _loss(F.linear(hidden, weight), labels)
    return first + 0.5 * _loss(F.linear(torch.tanh(hidden), weight), labels)


def losses_on_the_same_logits(hidden, weight, labels):
    """Predictions of the next token and of the one after."""
    logits = F.linear(hidden, weight)
    return _loss(logits[:, :-1], labels[:, 1:]) + 0.3 * _loss(logits[:, :-2], labels[:, 2:])


def heads_for_later_tokens(hidden, weight, second_weight, labels):
    """Multi-token prediction."""
    first = _loss(F.linear(hidden, weight)[:, :-1], labels[:, 1:])
    return first + 0.3 * _loss(F.linear(hidden, second_weight)[:, :-2], labels[:, 2:])


def accuracy(hidden, weight, labels):
    logits = F.linear(hidden, weight)
    correct = (logits.detach().argmax(-1) == labels).float()
    return _loss(logits, labels), correct.mean()


def accuracy_of_shifted_logits(hidden, weight, labels):
    logits = F.linear(hidden, weight).float() / 1.3
    with torch.no_grad():
        predictions = logits[..., :-1, :].argmax(dim=-1)
        valid = labels[..., 1:] != -100
        right = ((predictions == labels[..., 1:]) & valid).sum() / valid.sum()
    loss = _loss(logits[..., :-1, :], labels[..., 1:])
    return loss, right


def accuracy_of_shifted_predictions(hidden, weight, labels):
    logits = F.linear(hidden, weight)
    right = (logits.argmax(-1)[:, :-1] == labels[:, 1:]).sum()
    return _loss(logits[:, :-1], labels[:, 1:]), right


def accuracy_by_max(hidden, weight, labels):
    logits = F.linear(hidden, weight).view(-1, weight.shape[0])
    loss = F.cross_entropy(logits, labels.view(-1))
    _, predictions = torch.max(logits, 1)
    return loss, (predictions == labels.view(-1)).sum()


def accuracies_of_two_heads(hidden, weight, second_weight, labels):
    """The operation that uses both argmaxes has to move after both losses."""
    first, second = F.linear(hidden, weight), F.linear(hidden, second_weight)
    right = (first.argmax(-1) == labels).sum() + (second.argmax(-1) == labels).sum()
    return _loss(first, labels) + _loss(second, labels), right


def predictions_returned(hidden, weight, labels):
    logits = F.linear(hidden, weight)
    return _loss(logits, labels), logits.argmax(-1)


def accuracy_for_other_labels(hidden, weight, labels, tokens):
    logits = F.linear(hidden, weight)
    return _loss(logits, labels), (logits.argmax(-1) == tokens).sum()


def accuracy_where_minus_one_is_ignored(hidden, weight, labels):
    logits = F.linear(hidden, weight)
    labels = torch.where(labels == -100, -1, labels)
    return _loss(logits, labels, ignore_index=-1), (logits.argmax(-1) == labels).sum()


def head_checkpointed(hidden, weight, labels):
    logits = checkpoint(lambda hidden: F.linear(hidden, weight), hidden, use_reentrant=False)
    return _loss(logits.float(), labels)


def head_and_loss_checkpointed(hidden, weight, labels):
    return checkpoint(shift_by_slices, hidden, weight, labels, use_reentrant=False) * 2


def weighted_tokens(hidden, weight, labels, token_weights):
    losses = _loss(F.linear(hidden, weight), labels, reduction="none")
    return (losses * token_weights.view(-1)).sum() / token_weights.sum()


def masked_mean_of_each_sequence(hidden, weight, tokens, token_weights):
    """As GRPO has it, without an advantage."""
    log_probs = F.linear(hidden, weight).float().log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    mask = token_weights > 0.5
    return -((log_probs * mask).sum(-1) / mask.sum(-1)).mean()


# Log-probabilities and entropies. `tokens` are labels of which none is ignored.


def log_softmax_gathered(hidden, weight, tokens):
    log_probs = F.log_softmax(F.linear(hidden, weight).float(), dim=-1)
    return log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def log_probability_as_trl_has_it(hidden, weight, tokens):
    """`selective_log_softmax`, with a temperature and the shift of causal language models."""
    logits = F.linear(hidden, weight)[:, :-1].float() / 0.7
    index = tokens[:, 1:]
    selected_logits = torch.gather(logits, dim=-1, index=index.unsqueeze(-1)).squeeze(-1)
    logsumexp_values = torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
    return selected_logits - logsumexp_values


def log_probability_of_each_sequence(hidden, weight, tokens):
    """A loop over sequences, as TRL has it for 16 bits."""
    per_token = []
    for row_logits, row_labels in zip(F.linear(hidden, weight), tokens, strict=True):
        row_log_probs = F.log_softmax(row_logits, dim=-1)
        per_token.append(row_log_probs.gather(dim=-1, index=row_labels.unsqueeze(-1)).squeeze(-1))
    return torch.stack(per_token)


def log_softmax_by_logsumexp(hidden, weight, tokens):
    """As `Categorical` of torch.distributions normalises its logits."""
    logits = F.linear(hidden, weight)
    logits = logits - logits.logsumexp(dim=-1, keepdim=True)
    return logits.gather(2, tokens[..., None])[..., 0].exp().mean()


def log_softmax_by_maximum_and_exponentials(hidden, weight, tokens):
    logits = F.linear(hidden, weight).float()
    logits = logits - logits.max(dim=-1, keepdim=True)[0]
    log_probs = logits - torch.log(torch.exp(logits).sum(dim=-1, keepdim=True))
    return log_probs.gather(-1, tokens[..., None]).squeeze(-1) - 0.1 * (log_probs.exp() * log_probs).sum(-1)


def log_probability_by_maximum_and_exponentials(hidden, weight, tokens):
    logits = F.linear(hidden, weight)
    logits = logits - logits.detach().amax(dim=-1, keepdim=True)
    return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - logits.exp().sum(-1).log()


def log_probability_of_counts(hidden, weight, tokens):
    """A softmax that is spelled out, too."""
    logits = F.linear(hidden, weight)
    counts = (logits - logits.max(dim=-1, keepdim=True)[0]).exp()
    probabilities = counts / counts.sum(dim=-1, keepdim=True)
    return -probabilities.gather(-1, tokens.unsqueeze(-1)).log().mean()


def entropy_of_counts(hidden, weight, tokens):
    logits = F.linear(hidden, weight)
    probabilities = torch.exp(logits) / torch.exp(logits).sum(dim=-1, keepdim=True)
    return -(probabilities * torch.log(probabilities)).sum(dim=-1).mean()


def entropy_less_the_maximum(hidden, weight, tokens):
    logits = F.linear(hidden, weight)
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    return (shifted.logsumexp(-1) - (logits.softmax(-1) * shifted).sum(-1)).mean()


def log_probability_and_entropy_of_categorical(hidden, weight, tokens):
    """The labels are broadcast to the shape of the logits, and these clamped to be finite."""
    policy = Categorical(logits=F.linear(hidden, weight), validate_args=False)
    return -(policy.log_prob(tokens) + 0.1 * policy.entropy()).mean()


def probability_gathered(hidden, weight, bias, tokens):
    probabilities = torch.softmax(F.linear(hidden, weight, bias).view(-1, weight.shape[0]), dim=-1)
    return torch.take_along_dim(probabilities, tokens.view(-1, 1), dim=1).log().sum()


def log_probability_indexed(hidden, weight, tokens):
    logits = F.linear(hidden, weight).view(-1, weight.shape[0])
    rows = torch.arange(logits.shape[0], device=logits.device)
    return -F.log_softmax(logits, -1)[rows, tokens.view(-1) - 1].mean()


def log_probability_at_listed_rows(hidden, weight, tokens):
    log_probs = F.linear(hidden[0], weight).log_softmax(-1)
    return -log_probs[list(range(tokens.shape[1])), tokens[0]].mean()


def distillation_from_likeliest_tokens(hidden, weight, tokens):
    """A cross-entropy from a teacher's probabilities of its most likely tokens."""
    columns = torch.stack([tokens, tokens.flip(-1)], dim=-1)
    probabilities = torch.tensor([0.6, 0.3], device=hidden.device)
    log_prob = F.linear(hidden, weight).log_softmax(-1).gather(-1, columns)
    return -(probabilities * log_prob).sum(-1).mean()


def log_probability_indexed_in_three_dimensions(hidden, weight, tokens):
    log_probs = F.log_softmax(F.linear(hidden, weight), -1)
    sequences, positions = (torch.arange(size, device=hidden.device) for size in log_probs.shape[:2])
    return log_probs[sequences[:, None], positions, tokens]


def one_hot_targets(hidden, weight, tokens):
    """As BERT has it."""
    log_probs = F.linear(hidden, weight).log_softmax(-1)
    return -(F.one_hot(tokens, weight.shape[0]) * log_probs).sum(-1).mean()


def preference_loss(hidden, weight, tokens):
    """DPO without a reference: a loss of sums of log-probabilities."""
    log_probs = F.log_softmax(F.linear(hidden, weight), -1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    chosen, rejected = log_probs.sum(-1).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def clipped_ratio_with_entropy(hidden, weight, tokens):
    """PPO's and GRPO's objective with an entropy bonus, and what is logged beside it."""
    logits = F.linear(hidden, weight).float() / 0.9
    log_probs = torch.log_softmax(logits, dim=-1)
    per_token = log_probs.gather(-1, tokens[..., None]).squeeze(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    ratio = (per_token - per_token.detach() + 0.1).exp()
    advantage = torch.arange(tokens.shape[1], device=tokens.device) / tokens.shape[1] - 0.5
    gain, clipped = ratio * advantage, ratio.clamp(0.8, 1.2) * advantage
    # thunder has no gradient of torch.minimum.
    loss = -torch.where(gain < clipped, gain, clipped).mean() - 0.01 * entropy.mean()
    return loss, (logits.argmax(-1) == tokens).float().mean()


def clipped_ratio_as_trl_has_it(hidden, weight, tokens, advantages, token_weights):
    """GRPO: a mean over sequences of means over their tokens, a divergence from a reference, and what is logged."""
    logits = F.linear(hidden, weight) / 0.9
    log_probs = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(logits, dim=-1)
    mask = (token_weights > 0.5).float()
    old, reference = log_probs.detach() + 0.3 * token_weights, log_probs.detach() - 0.1
    divergence = torch.exp(reference - log_probs) - (reference - log_probs) - 1
    ratio = torch.exp(log_probs - old)
    gain = torch.min(ratio * advantages.unsqueeze(1), ratio.clamp(0.8, 1.2) * advantages.unsqueeze(1))
    losses = 0.04 * divergence - gain
    loss = ((losses * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
    return loss, ((ratio.detach() < 0.8) * mask).sum()


def clipped_ratio_of_a_response(hidden, weight, tokens, token_weights):
    """As OpenRLHF has it: log-probabilities of all tokens, of which the last are the response's."""
    log_probs = F.log_softmax(F.linear(hidden, weight), -1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    response, advantages = log_probs[:, -8:], token_weights[:, -8:] - 0.5
    ratio = torch.exp(response + 4)
    gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -(gain * (advantages > -0.2)).mean()


def masked_means_of_three_losses(hidden, weight, tokens, token_weights):
    """A policy's loss, a bonus of entropy and a divergence, as verl has it."""
    log_probs = F.linear(hidden, weight).log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    per_token = log_probs.gather(-1, tokens[..., None]).squeeze(-1)
    mask = (token_weights > 0.5).float()
    ratio, divergence = torch.exp(per_token + 4), (per_token + 5).square() * 0.5
    policy, bonus, penalty = ((losses * mask).sum() / mask.sum() for losses in (-ratio, entropy, divergence))
    return policy - 0.01 * bonus + 0.1 * penalty


def focal_loss(hidden, weight, labels):
    losses = _loss(F.linear(hidden, weight), labels, reduction="none")
    return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


def entropy_as_verl_has_it(hidden, weight, tokens):
    """Logged beside a log-probability."""
    logits = F.linear(hidden, weight)
    log_probs = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(logits, dim=-1)
    with torch.no_grad():
        probabilities = F.softmax(logits, dim=-1)
        entropy = torch.logsumexp(logits, dim=-1) - torch.sum(probabilities * logits, dim=-1)
    return log_probs.mean(), entropy


def entropy_of_probabilities(hidden, weight, tokens):
    """As its formula has it."""
    probabilities = F.softmax(F.linear(hidden, weight).float(), dim=-1)
    return -(probabilities * probabilities.log()).sum(-1).mean()


def entropies_of_three_operations(hidden, weight, second_weight, tokens):
    """p log p as one operation, which is 0 where p is, and a product and its sum as one."""
    logits, others = F.linear(hidden, weight), F.linear(hidden, second_weight)
    first = torch.special.entr(logits[:, 1:].softmax(-1)).sum(-1)
    second = torch.xlogy(others.softmax(-1), others.log_softmax(-1).exp()).sum(-1)
    third = torch.einsum("btv,btv->bt", logits[:, :1].softmax(-1), logits[:, :1].log_softmax(-1))
    return first.mean() - second.mean() - third.mean()


def entropy_in_chunks(hidden, weight, tokens):
    """As TRL's `entropy_from_logits`."""
    entropies = []
    for chunk in F.linear(hidden, weight).view(-1, weight.shape[0]).split(hidden.shape[1] - 4):
        log_probs = F.log_softmax(chunk, dim=-1)
        entropies.append(-(torch.exp(log_probs) * log_probs).sum(-1))
    return torch.cat(entropies).view(tokens.shape)


def entropy_beside_cross_entropy(hidden, weight, labels):
    """A penalty of confidence: a gradient of the entropy, of ignored tokens, too."""
    log_probs = F.log_softmax(F.linear(hidden, weight), dim=-1)
    loss = F.nll_loss(log_probs.view(-1, weight.shape[0]), labels.view(-1), ignore_index=-100)
    return loss + 0.01 * (log_probs.exp() * log_probs).sum(-1).mean()


def z_term_beside_cross_entropy(hidden, weight, labels):
    """As PaLM has it: a gradient of the log-sum-exp; a mean over all tokens beside one over those with a label."""
    logits = F.linear(hidden, weight).float()
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return loss + 1e-4 * torch.logsumexp(logits, dim=-1).square().mean()


def entropy_logged_beside_cross_entropy(hidden, weight, labels):
    logits = F.linear(hidden, weight).float()
    with torch.no_grad():
        log_probs = logits[:, :-1].log_softmax(-1)
        entropy = (-log_probs.exp() * log_probs).sum(-1)
    return _loss(logits[:, :-1], labels[:, 1:]), entropy


def loss_logged_beside_a_smoothed_one(hidden, weight, labels):
    logits = F.linear(hidden, weight).float()
    loss = _loss(logits, labels, label_smoothing=0.1)
    return loss, _loss(logits.detach(), labels, reduction="none")


def policy_beside_cross_entropy(hidden, weight, labels):
    """Where something reads the logits at the labels, none is -100."""
    logits, labels = F.linear(hidden, weight).float(), labels.clamp(min=0)
    log_probs = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return 0.1 * _loss(logits, labels) - torch.exp(log_probs - log_probs.detach()).mean()


def mean_logit_beside_cross_entropy(hidden, weight, labels):
    """A penalty of logits whose mean is not 0."""
    logits = F.linear(hidden, weight).float()
    return _loss(logits, labels) + 1e-4 * logits.mean(-1).square().mean()


def log_probability_beside_another_use(hidden, weight, tokens):
    logits = F.linear(hidden, weight)
    of_labels = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return (of_labels - logits.logsumexp(-1)).mean() + of_labels.square().mean()


def log_softmax_with_the_maximum_added_again(hidden, weight, tokens):
    logits = F.linear(hidden, weight)
    row_max = logits.amax(-1, keepdim=True)
    log_probs = logits - ((logits - row_max).exp().sum(-1, keepdim=True).log() + row_max)
    return log_probs.gather(-1, tokens[..., None]).mean()


def divergence_from_a_teacher(hidden, weight, second_weight):
    with torch.no_grad():
        teacher = F.linear(hidden, second_weight).softmax(-1)
    return F.kl_div(F.linear(hidden, weight).log_softmax(-1), teacher, reduction="batchmean")


def divergence_from_a_teacher_written_out(hidden, weight, second_weight):
    with torch.no_grad():
        teacher = F.linear(hidden, second_weight).log_softmax(-1)
    return (teacher.exp() * (teacher - F.linear(hidden, weight).log_softmax(-1))).sum(-1).mean()


def cross_entropy_from_a_teacher_and_from_labels(hidden, weight, second_weight, labels):
    """As in Hinton, Vinyals and Dean: at a temperature, and without it; both losses and an accuracy are logged."""
    student, teacher = (F.linear(hidden, each).float().flatten(0, 1) for each in (weight, second_weight.detach()))
    soft = F.cross_entropy(student / 2, F.softmax(teacher.detach() / 2, dim=-1))
    hard = F.cross_entropy(student, labels.flatten())
    accuracy = (student.argmax(-1) == labels.flatten()).float().mean()
    return 0.9 * 2**2 * soft + 0.1 * hard, soft.detach(), hard.detach(), accuracy


FUSED: tuple[Callable, ...] = (
    float32_logits,
    flattened,
    flat_hidden_states,
    transposed,
    permuted_and_contiguous,
    matrix_transposed,
    sequence_first,
    one_sequence,
    one_token,
    padded_label_shift,
    shift_by_slices,
    shift_by_slices_and_transpose,
    shift_by_narrow,
    sliced_rows_of_flat_logits,
    last_position,
    rows_picked_by_a_tensor,
    sliced_hidden_states,
    first_columns_of_the_vocabulary,
    divided,
    multiplied,
    negated_and_shifted,
    scaled_by_a_tensor,
    temperature_of_each_sequence,
    softcapped,
    softcapped_in_one_line,
    softcapped_by_a_sigmoid,
    softcapped_by_a_shifted_sigmoid,
    softcapped_and_shifted,
    matmul_operator,
    torch_matmul,
    matmul_with_a_matrix,
    matmul_with_a_square_matrix,
    torch_mm,
    einsum,
    convolution_of_one_token,
    linear_with_bias,
    bias_added,
    bias_of_one_row,
    bias_added_to_matmul,
    addmm,
    low_rank_adapter,
    low_rank_adapter_by_matmul,
    low_rank_adapter_on_logits_without_grad,
    tied_embeddings,
    label_smoothing,
    label_smoothing_by_hand,
    class_weights,
    class_weights_and_label_smoothing,
    class_weights_of_nll_loss,
    log_softmax_and_nll_loss,
    log_softmax_and_transposed_nll_loss,
    modules_of_log_softmax_and_nll_loss,
    num_items_in_batch,
    divided_by_the_number_of_valid_targets,
    added_to_other_losses,
    losses_on_one_head,
    losses_on_the_same_logits,
    heads_for_later_tokens,
    accuracy,
    accuracy_of_shifted_logits,
    accuracy_of_shifted_predictions,
    accuracy_by_max,
    accuracies_of_two_heads,
    predictions_returned,
    accuracy_for_other_labels,
    accuracy_where_minus_one_is_ignored,
    head_checkpointed,
    head_and_loss_checkpointed,
    weighted_tokens,
    masked_mean_of_each_sequence,
    log_softmax_gathered,
    log_probability_as_trl_has_it,
    log_probability_of_each_sequence,
    log_softmax_by_logsumexp,
    log_softmax_by_maximum_and_exponentials,
    log_probability_by_maximum_and_exponentials,
    log_probability_of_counts,
    entropy_of_counts,
    entropy_less_the_maximum,
    log_probability_and_entropy_of_categorical,
    probability_gathered,
    log_probability_indexed,
    log_probability_at_listed_rows,
    distillation_from_likeliest_tokens,
    log_probability_indexed_in_three_dimensions,
    one_hot_targets,
    preference_loss,
    clipped_ratio_with_entropy,
    clipped_ratio_as_trl_has_it,
    clipped_ratio_of_a_response,
    masked_means_of_three_losses,
    focal_loss,
    entropy_as_verl_has_it,
    entropy_of_probabilities,
    entropies_of_three_operations,
    entropy_in_chunks,
    entropy_beside_cross_entropy,
    z_term_beside_cross_entropy,
    entropy_logged_beside_cross_entropy,
    loss_logged_beside_a_smoothed_one,
    policy_beside_cross_entropy,
    mean_logit_beside_cross_entropy,
    log_probability_beside_another_use,
    log_softmax_with_the_maximum_added_again,
    divergence_from_a_teacher,
    divergence_from_a_teacher_written_out,
    cross_entropy_from_a_teacher_and_from_labels,
)


# What is not fused.


def accuracy_of_other_rows(hidden, weight, labels):
    logits = F.linear(hidden, weight)
    right = (logits.argmax(-1)[:, 1:] == labels[:, 1:]).sum()
    return _loss(logits[:, :-1], labels[:, 1:]), right


def labels_from_each_other(hidden, weight, second_weight):
    first, second = F.linear(hidden, weight), F.linear(hidden, second_weight)
    return _loss(first, second.argmax(-1)) + _loss(second, first.argmax(-1))


def labels_from_predictions(hidden, weight, labels):
    """The region would need what it computes."""
    logits = F.linear(hidden, weight)
    is_wrong = logits.argmax(-1) != labels
    return _loss(logits, torch.where(is_wrong, labels, -100))


def logits_returned(hidden, weight, labels):
    logits = F.linear(hidden, weight)
    return _loss(logits, labels), logits


def logits_used_by_another_loss(hidden, weight, labels):
    logits = F.linear(hidden, weight)
    return _loss(logits, labels) + 1e-3 * logits.square().mean()


def another_loss_on_the_same_logits_is_not_fused(hidden, weight, labels):
    logits = F.linear(hidden, weight)
    return _loss(logits[:, :-1], labels[:, 1:]) + _loss(torch.relu(logits), labels)


def log_probabilities_used(hidden, weight, labels):
    log_probs = F.log_softmax(F.linear(hidden, weight), dim=-1)
    loss = F.nll_loss(log_probs.view(-1, weight.shape[0]), labels.view(-1), ignore_index=-100)
    return loss - 0.01 * log_probs.square().sum(-1).mean()


def labels_of_one_sequence_for_all(hidden, weight, tokens):
    return Categorical(logits=F.linear(hidden, weight), validate_args=False).log_prob(tokens[:1]).mean()


def log_probabilities_of_other_rows(hidden, weight, tokens):
    """Of the first token of the second sequence, where the labels have the second one of the first."""
    rows = torch.arange(hidden.shape[0], device=hidden.device)
    log_probs = F.linear(hidden[:, : len(rows)], weight).log_softmax(-1)
    return log_probs[rows, rows[:, None], tokens[:, : len(rows)]].sum()


def log_probabilities_of_flattened_rows(hidden, weight, tokens):
    log_probs = F.linear(hidden, weight).log_softmax(-1)
    starts = torch.arange(tokens.numel(), device=tokens.device) * weight.shape[0]
    return -log_probs.view(-1).index_select(0, starts + tokens.view(-1)).mean()


def log_probabilities_of_all_rows_for_each_label(hidden, weight, tokens):
    return -F.linear(hidden[0], weight).log_softmax(-1).index_select(-1, tokens[0]).diagonal().mean()


def log_probability_by_where(hidden, weight, tokens):
    log_probs = F.linear(hidden, weight).log_softmax(-1)
    is_label = torch.arange(weight.shape[0], device=tokens.device) == tokens[..., None]
    return -torch.where(is_label, log_probs, 0.0).sum(-1).mean()


def logits_gathered(hidden, weight, tokens):
    return F.linear(hidden, weight).gather(-1, tokens.unsqueeze(-1)).mean()


def entropy_beside_an_epsilon(hidden, weight, tokens):
    probabilities = F.softmax(F.linear(hidden, weight), dim=-1)
    return -(probabilities * torch.log(probabilities + 1e-9)).sum(-1).mean()


def entropy_by_nansum(hidden, weight, tokens):
    log_probs = F.linear(hidden, weight).log_softmax(-1)
    return -(log_probs.exp() * log_probs).nansum(-1).mean()


def smoothed_one_hot_targets(hidden, weight, tokens):
    log_probs = F.linear(hidden, weight).log_softmax(-1)
    return -((0.9 * F.one_hot(tokens, weight.shape[0]) + 0.001) * log_probs).sum(-1).mean()


def divergence_from_a_teacher_at_another_temperature(hidden, weight, second_weight):
    with torch.no_grad():
        teacher = F.linear(hidden, second_weight).softmax(-1)
    return F.kl_div(F.log_softmax(F.linear(hidden, weight) / 2, dim=-1), teacher, reduction="batchmean")


def log_probability_after_an_activation(hidden, weight, tokens):
    logits = torch.relu(F.linear(hidden, weight))
    return F.log_softmax(logits, -1).gather(-1, tokens.unsqueeze(-1)).sum()


def tanh_after_the_maximum_was_subtracted(hidden, weight, labels):
    logits = F.linear(hidden, weight)
    return _loss(torch.tanh(logits - logits.amax(-1, keepdim=True)), labels)


def nll_loss_of_logits(hidden, weight, labels):
    return F.nll_loss(F.linear(hidden, weight).view(-1, weight.shape[0]), labels.view(-1), ignore_index=-100)


def activation(hidden, weight, labels):
    return _loss(torch.relu(F.linear(hidden, weight)), labels)


def scaled_by_a_tensor_with_a_bias(hidden, weight, bias, labels, temperature):
    """A factor of the hidden states would not be one of the bias."""
    return _loss(F.linear(hidden, weight, bias) / temperature, labels)


def convolution_of_three_tokens(hidden, weight, labels):
    kernel = torch.stack([weight, weight, weight], -1)
    return F.cross_entropy(F.conv1d(hidden.transpose(1, 2), kernel, padding=1), labels)


def bias_after_a_factor(hidden, weight, bias, labels):
    return _loss(F.linear(hidden, weight) * 0.5 + bias, labels)


def changed_in_place(hidden, weight, labels):
    logits = F.linear(hidden, weight)
    logits /= 0.7
    return _loss(logits, labels)


def last_columns_of_the_vocabulary(hidden, weight, labels):
    return _loss(F.linear(hidden, weight)[..., 1:], labels.clamp(min=-100, max=90))


def batch_as_classes(hidden, weight, labels):
    """(B, T, V) logits as if T were the number of classes."""
    classes = torch.zeros(hidden.shape[0], weight.shape[0], dtype=torch.long, device=hidden.device)
    with torch.no_grad():
        # thunder itself has no backward of this.
        return F.cross_entropy(F.linear(hidden, weight), classes)


NOT_FUSED: dict[Callable, Reason] = {
    accuracy_of_other_rows: Reason.LOGITS_USED,
    labels_from_each_other: Reason.LOGITS_USED,
    labels_from_predictions: Reason.LOGITS_USED,
    logits_returned: Reason.LOGITS_RETURNED,
    logits_used_by_another_loss: Reason.LOGITS_USED,
    another_loss_on_the_same_logits_is_not_fused: Reason.LOGITS_USED,
    log_probabilities_used: Reason.LOGITS_USED,
    labels_of_one_sequence_for_all: Reason.NOT_A_LOG_PROBABILITY,
    log_probabilities_of_other_rows: Reason.NOT_A_LOG_PROBABILITY,
    log_probabilities_of_flattened_rows: Reason.NOT_A_LOG_PROBABILITY,
    log_probabilities_of_all_rows_for_each_label: Reason.NOT_A_LOG_PROBABILITY,
    log_probability_by_where: Reason.CLASS_PROBABILITIES,
    logits_gathered: Reason.NOT_A_LOG_PROBABILITY,
    log_probability_after_an_activation: Reason.TRANSFORMED_LOGITS,
    entropy_by_nansum: Reason.TRANSFORMED_LOGITS,
    entropy_beside_an_epsilon: Reason.TRANSFORMED_LOGITS,
    smoothed_one_hot_targets: Reason.CLASS_PROBABILITIES,
    divergence_from_a_teacher_at_another_temperature: Reason.CLASS_PROBABILITIES,
    tanh_after_the_maximum_was_subtracted: Reason.TRANSFORMED_LOGITS,
    nll_loss_of_logits: Reason.NOT_LOG_PROBABILITIES,
    activation: Reason.TRANSFORMED_LOGITS,
    scaled_by_a_tensor_with_a_bias: Reason.TRANSFORMED_LOGITS,
    convolution_of_three_tokens: Reason.ANOTHER_PRODUCT,
    bias_after_a_factor: Reason.TRANSFORMED_LOGITS,
    changed_in_place: Reason.OPERAND_MODIFIED,
    last_columns_of_the_vocabulary: Reason.TRANSFORMED_LOGITS,
    batch_as_classes: Reason.CLASS_DIMENSION,
}


def table_header(versions: str) -> list[str]:
    """The first lines of patterns.md."""
    sizes = f"{SIZES.batch} sequences of {SIZES.sequence} tokens, hidden size {SIZES.hidden}, {SIZES.vocab} columns"
    return [
        "# Ways to write a loss",
        "",
        "The programs of `traces/patterns.py`, one line for each loss: fused, with the plan, or not, with the reason.",
        f"With {sizes}, on a CPU.",
        "",
        "Printed by `python traces/regenerate.py --device cpu`, which `tests/compile/test_patterns.py` compares:",
        f"{versions}.",
        "",
        "| program | fused | plan or reason |",
        "| --- | --- | --- |",
    ]


def table_rows(program: Callable, decisions: Iterable) -> list[str]:
    """Its lines in patterns.md, one for each decision of `explain`."""
    rows = []
    for decision in decisions:
        sentence = str(decision).removeprefix(f"{decision.source}: ").removeprefix("not fused, because ")
        fused = "yes" if decision.fused else "no"
        rows.append(f"| `{program.__name__}` | {fused} | {sentence.removeprefix('fused, ')} |")
    return rows
