"""`python -m sparsewire.cli` is the `sparsewire` command."""

from . import main

raise SystemExit(main())
