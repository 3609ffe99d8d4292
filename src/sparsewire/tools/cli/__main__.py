"""`python -m sparsewire.tools.cli` is the `sparsewire` command."""

from . import main

raise SystemExit(main())
