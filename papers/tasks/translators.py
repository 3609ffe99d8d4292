"""Models that translate: an attentional encoder–decoder and a transformer, both small.

Both can have layer normalisation, and share one matrix for source embeddings, target embeddings and
the output. Shapes do not depend on the sentences, and nothing waits for the device, so a training
step can be captured.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from .translation import BEGIN, END, PAD

_HEADS = 4


class Translator(nn.Module, ABC):
    """Base class of both; `forward` takes sources and targets side by side, as a batch."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        nn.init.normal_(self.words.weight, std=width**-0.5)

    def forward(self, pairs: Tensor) -> Tensor:
        """Return the scores of every word at every position of the targets."""
        sources, targets = pairs.unbind(1)
        return self.answer(self.decode(self.encode(sources), sources != PAD, targets))

    @abstractmethod
    def encode(self, sources: Tensor) -> Tensor:
        """Return the encoding of every position of the sources."""

    @abstractmethod
    def decode(self, memory: Tensor, is_word: Tensor, targets: Tensor) -> Tensor:
        """Return the state at every position of the targets, given the targets before it."""

    def answer(self, hidden: Tensor) -> Tensor:
        """Return the scores of every word."""
        return functional.linear(hidden, self.words.weight)

    def embed(self, sentences: Tensor) -> Tensor:
        """Return words as vectors, with components near one."""
        found: Tensor = self.words(sentences) * math.sqrt(self.words.embedding_dim)
        return found


class Recurrent(Translator):
    """A bidirectional GRU encodes, and another GRU decodes, with attention after its steps.

    Layer normalisation applies to the embeddings, the encodings and the outputs of the decoder.

    Reference: Luong et al. 2015, global attention without input feeding, so that a whole target is
        one call.
    """

    def __init__(self, words: int, width: int, normalised: bool) -> None:
        super().__init__(words, width)
        self.reader = nn.GRU(width, width // 2, batch_first=True, bidirectional=True)
        self.start = nn.Linear(width, width)
        self.writer = nn.GRU(width, width, batch_first=True)
        self.query = nn.Linear(width, width, bias=False)
        self.mix = nn.Linear(2 * width, width)
        self.embedded, self.read, self.mixed = (_norm(width, normalised) for _ in range(3))

    def encode(self, sources: Tensor) -> Tensor:
        # Padding is zero. The backward direction begins there, which gives it a first state.
        is_word = (sources != PAD)[:, :, None]
        found: Tensor = self.read(_recur(self.reader, self.embedded(self.embed(sources)) * is_word))
        return found

    def decode(self, memory: Tensor, is_word: Tensor, targets: Tensor) -> Tensor:
        taken = is_word[:, :, None] / is_word.sum(dim=1)[:, None, None]
        first = torch.tanh(self.start((memory * taken).sum(dim=1)))
        hidden = _recur(self.writer, self.embedded(self.embed(targets)), first[None])
        scores = self.query(hidden) @ memory.transpose(1, 2)
        scores = scores.masked_fill(~is_word[:, None, :], -math.inf)
        seen = torch.softmax(scores, dim=2) @ memory
        found: Tensor = self.mixed(torch.tanh(self.mix(torch.cat([hidden, seen], dim=2))))
        return found


class Transformer(Translator):
    """Self-attention on both sides, and attention between them.

    With layer normalisation, it comes before every block. Without it, blocks begin with an output
    that is small enough for the sum not to grow.

    Reference: Vaswani et al. 2017.
    """

    places: Tensor

    def __init__(
        self, words: int, width: int, layers: int, normalised: bool, longest: int = 256
    ) -> None:
        super().__init__(words, width)
        self.reader = nn.ModuleList(_Layer(width, normalised, False) for _ in range(layers))
        self.writer = nn.ModuleList(_Layer(width, normalised, True) for _ in range(layers))
        self.read, self.written = _norm(width, normalised), _norm(width, normalised)
        self.register_buffer("places", _waves(longest, width), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2 and "words" not in name:
                last = name.endswith(("out.weight", "down.weight"))
                nn.init.xavier_uniform_(parameter, (3 * layers) ** -0.5 if last else 1.0)

    def encode(self, sources: Tensor) -> Tensor:
        hidden, mask = self._placed(sources), _mask(sources != PAD)
        for layer in self.reader:
            hidden = layer(hidden, mask)
        found: Tensor = self.read(hidden)
        return found

    def decode(self, memory: Tensor, is_word: Tensor, targets: Tensor) -> Tensor:
        # Padding comes last, so that no word attends to it.
        hidden, mask = self._placed(targets), _mask(is_word)
        for layer in self.writer:
            hidden = layer(hidden, None, memory, mask)
        found: Tensor = self.written(hidden)
        return found

    def _placed(self, sentences: Tensor) -> Tensor:
        return self.embed(sentences) + self.places[: sentences.shape[1]]


class _Layer(nn.Module):
    """Self-attention, attention to the encoder if asked for, and two matrices."""

    def __init__(self, width: int, normalised: bool, looks_across: bool) -> None:
        super().__init__()
        self.itself = _Attention(width)
        self.across = _Attention(width) if looks_across else None
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(_norm(width, normalised) for _ in range(2 + looks_across))

    def forward(
        self,
        hidden: Tensor,
        mask: Tensor | None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> Tensor:
        normed = self.norms[0](hidden)
        hidden = hidden + self.itself(normed, normed, mask)
        if self.across is not None:
            hidden = hidden + self.across(self.norms[2](hidden), memory, memory_mask)
        grown = functional.gelu(self.up(self.norms[1](hidden)))
        total: Tensor = hidden + self.down(grown)
        return total


class _Attention(nn.Module):
    """Attention with four heads; without a mask, it is causal."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, hidden: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        query, key, value = (
            part.unflatten(2, (_HEADS, -1)).transpose(1, 2)
            for part in (self.query(hidden), self.key(memory), self.value(memory))
        )
        seen = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None
        )
        found: Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return found


def build(
    model: Literal["rnn", "transformer"],
    words: int,
    width: int,
    layers: int,
    normalised: bool,
    seed: int,
) -> Translator:
    """Return a model of `words` subwords, the same for the same `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if model == "rnn":
            return Recurrent(words, width, normalised)
        return Transformer(words, width, layers, normalised)


@torch.no_grad()
def translate(model: Translator, sources: Tensor) -> Tensor:
    """Return the likeliest word at every position, given those before; as many as in `sources`."""
    memory, is_word = model.encode(sources), sources != PAD
    length = sources.shape[1]
    targets = torch.full_like(sources[:, :1], BEGIN).repeat(1, length + 1)
    is_over = torch.zeros_like(is_word[:, 0])
    for place in range(length):
        hidden = model.decode(memory, is_word, targets[:, : place + 1])
        following = model.answer(hidden[:, -1]).argmax(dim=1)
        targets[:, place + 1] = following.masked_fill(is_over, PAD)
        is_over |= following == END
    return targets[:, 1:]


def _mask(is_word: Tensor) -> Tensor:
    """Return what to add to the scores of attention so that padding is ignored."""
    zeros = torch.zeros_like(is_word, dtype=torch.float32)
    return zeros.masked_fill(~is_word, -math.inf)[:, None, None, :]


def _norm(width: int, normalised: bool) -> nn.Module:
    return nn.LayerNorm(width) if normalised else nn.Identity()


def _recur(gru: nn.GRU, inputs: Tensor, first: Tensor | None = None) -> Tensor:
    """Return all states of a GRU, in float32: under autocast cuDNN would use float16 for them."""
    with torch.autocast(inputs.device.type, enabled=False), warnings.catch_warnings():
        # The weights are stored for the exchange, in another order than cuDNN's, which copies them.
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single")
        found: Tensor = gru(inputs.float(), None if first is None else first.float())[0]
    return found


def _waves(length: int, width: int) -> Tensor:
    """Return sines and cosines that encode positions."""
    angles = torch.arange(length)[:, None] * 1e4 ** (-torch.arange(0, width, 2) / width)
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)
