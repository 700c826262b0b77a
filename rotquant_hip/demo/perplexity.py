# SPDX-License-Identifier: MIT
"""Next-token loss over windows of text, and what quantising does to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

BATCH = 4  # windows in one forward pass


@dataclass(frozen=True)
class Losses:
    """Sum of negative log-likelihoods (nats) and number of predicted tokens, per window."""

    nats: tuple[float, ...]
    tokens: tuple[int, ...]

    @property
    def mean(self) -> float:
        """Log-perplexity: nats per predicted token."""
        return math.fsum(self.nats) / sum(self.tokens)

    @property
    def perplexity(self) -> float:
        return math.exp(self.mean)

    def change_from(self, other: Losses) -> tuple[float, float]:
        """Difference of `mean` to `other` on the same windows, and its standard error.

        The error is paired, over windows; NaN for a single one.
        """
        count = len(self.tokens)
        rate = sum(self.tokens) / count
        changes = [(a - b) / rate for a, b in zip(self.nats, other.nats, strict=True)]
        mean = math.fsum(changes) / count
        if count < 2:
            return mean, math.nan
        variance = math.fsum((change - mean) ** 2 for change in changes) / (count - 1)
        return mean, math.sqrt(variance / count)


def share_recovered(reference: Losses, plain: Losses, rotated: Losses) -> float:
    """Part of the log-perplexity that quantising lost and rotation won back; 1 is all of it.

    NaN where quantising lost nothing: there is nothing to win back.
    """
    lost = plain.mean - reference.mean
    return (plain.mean - rotated.mean) / lost if lost > 0 else math.nan


@torch.no_grad()
def evaluate(
    model: nn.Module, windows: list[list[int]], advance: Callable[[int], None] = lambda done: None
) -> Losses:
    """Loss of every token given those before it in its window. `advance` gets tokens done."""
    device = model.lm_head.weight.device
    nats: list[float] = []
    for batch in _batches(windows):
        ids = torch.tensor(batch, device=device)
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        # Window by window: float32 logits of 49152 words are 100 MB for 512 tokens.
        for states, targets in zip(hidden[:, :-1], ids[:, 1:], strict=True):
            logits = model.lm_head(states).float()
            nats.append(functional.cross_entropy(logits, targets, reduction="sum").item())
        advance(ids.numel())
    return Losses(tuple(nats), tuple(len(window) - 1 for window in windows))


def _batches(windows: list[list[int]]) -> Iterator[list[list[int]]]:
    """Up to BATCH neighbours of equal length at a time (the last window may be shorter)."""
    batch: list[list[int]] = []
    for window in windows:
        if batch and (len(batch) == BATCH or len(window) != len(batch[0])):
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch
