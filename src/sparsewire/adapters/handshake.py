"""Ranks make sure that they mean the same, in messages of a fixed size, before any others."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..groups import Group
from ..message import Header, compare, fingerprint
from ..requests import all_gather
from ..scheme import AnyScheme


def handshake(
    group: Group, scheme: AnyScheme, parameters: Mapping[str, Tensor], options: str = ""
) -> None:
    """Raise `DisagreementError` on all ranks unless all have the same scheme and parameters.

    `options` is whatever else must be the same for the ranks to stay together.
    """
    layout = fingerprint(*(f"{n}:{tuple(p.shape)}:{p.dtype}" for n, p in parameters.items()))
    own = Header(group.rank, 0, 0, fingerprint(repr(scheme), options), layout, 0)
    answers = group.wait(group.start(all_gather(own.pack())))
    headers = [Header.unpack(data, rank) for rank, data in enumerate(answers)]
    compare(headers, own, repr(scheme))
