"""`sparsewire reproduce`: what the papers claim, trained and shown beside their numbers."""

from __future__ import annotations

from ..papers.reproduce import Request, RequestError, run
from .errors import USAGE, CommandError
from .options import Reproduce


def reproduce(options: Reproduce) -> int:
    """Train what is missing of a study, and show what there is; without a study, list all."""
    if options.quick and options.recipe not in (None, "quick"):
        raise CommandError(
            f"--quick and --recipe {options.recipe} exclude each other: leave one out", USAGE
        )
    request = Request(
        name=None if options.list else options.name,
        recipe="quick" if options.quick else options.recipe,
        only=options.only,
        seeds=options.seeds,
        device=options.device,
        data=options.data,
        download=options.download,
        store=options.store,
        minutes=options.minutes,
        beside=options.beside,
        quiet=options.quiet,
    )
    try:
        run(request)
    except RequestError as error:
        raise CommandError(str(error), USAGE) from error
    return 0
