"""A decoder-only transformer: each position predicts the next character from those up to its own.

Vaswani et al., arXiv:1706.03762, with normalization before each part as in GPT-2 (Radford et al., 2019), whose initial
weights it also has.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Causal attention, then a small network at each position; the output of each is added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.before_network = nn.LayerNorm(width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output; it has the shape of `x`, (batch, length, width)."""
        batch, length, width = x.shape
        parts = self.query_key_value(self.before_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attended(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.network(self.before_network(x))


class Transformer(nn.Module):
    """The model.

    Args:
        characters: the number of different characters.
        context: the largest number of characters it sees.
        layers, heads, width: the number of blocks, of attention heads in each, and of values per position.
    """

    def __init__(self, characters: int, context: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(characters, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.guess = nn.Linear(width, characters)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_sum = name.endswith(("attended.weight", "network.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if into_sum else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, numbers: Tensor) -> Tensor:
        """Return the logits of each next character.

        Args:
            numbers: int64 of shape (batch, length), length at most the context.

        Returns:
            Logits of shape (batch, length, characters).
        """
        places = torch.arange(numbers.shape[1], device=numbers.device)
        return self.guess(self.norm(self.blocks(self.embedding(numbers) + self.position(places))))

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy of the predictions, in nats per character."""
        return functional.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def sample(self, start: Tensor, count: int, temperature: float, seed: int) -> list[int]:
        """Continue `start`, of shape (length,), with `count` characters drawn from the predictions."""
        generator = torch.Generator().manual_seed(seed)
        numbers = start[None]
        for _ in range(count):
            logits = self(numbers[:, -self.context :])[:, -1] / temperature
            drawn = torch.multinomial(torch.softmax(logits, -1), 1, generator=generator)
            numbers = torch.cat([numbers, drawn], 1)
        return [int(number) for number in numbers[0, len(start) :]]
